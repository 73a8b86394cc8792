"""Stored responses and the events of those that run in the background: on the bus, for all frontends and through restarts."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from kvbus_frontend.core.failures import api_error
from kvbus_frontend.core.sealing import Sealer
from kvbus_frontend.core.stored_responses import NotAResponse, StoredResponse, pack, unpack
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.buckets import Bucket, BucketLimits
from kvbus_runtime.bus import Bus, RequestFailed
from kvbus_runtime.byte_logs import ByteLogs, LogLimits
from kvbus_runtime.errors import ObjectFailed
from kvbus_runtime.metrics import Metrics

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""What is larger is packed and unpacked in a thread."""
STATE_INTERVAL_S = 10.0
RETRY_PAUSE_S = 0.5
SEAL_KEY = "seal"
SEAL_KEY_BYTES = 32


class ResponseStore:
    """``events``: logs of server-sent events by response id."""

    def __init__(self, bus: Bus, settings: FrontendSettings, metrics: Metrics, log: Any) -> None:
        limits = BucketLimits(
            total_bytes=settings.response_store_bytes,
            entries=settings.response_store_entries,
            age_s=settings.response_ttl_s,
            value_bytes=settings.max_stored_response_bytes,
        )
        self._bucket = Bucket(bus, bus.subjects.responses_bucket, limits)
        self._log = log
        self.events = ByteLogs(
            bus,
            bus.subjects.response_events_stream,
            bus.subjects.response_events,
            LogLimits(total_bytes=settings.response_events_bytes, age_s=settings.response_events_ttl_s),
        )
        self._saved = metrics.counter("responses_saved", "responses put into the store, by outcome", ("outcome",))
        self._loaded = metrics.counter("responses_loaded", "looks into the store, by outcome", ("outcome",))
        self._bytes = metrics.gauge("response_store_bytes", "size of the store of all frontends, lately")
        self._entries = metrics.gauge("response_store_entries", "entries in the store of all frontends, lately")
        self._looked_at = 0.0

    async def save(self, stored: StoredResponse) -> bool:
        """Whether it can be found from now on. What cannot be stored is logged: the answer itself is not lost by it."""
        try:
            await self._bucket.put(stored.id, await self._work(len(stored.history) << 10, lambda: pack(stored)))
        except (ObjectFailed, RequestFailed) as problem:
            outcome = problem.reason if isinstance(problem, ObjectFailed) else "unavailable"
            self._saved.labels(outcome).inc()
            self._log.warning("response_not_stored", response=stored.id, reason=str(problem))
            return False
        self._saved.labels("stored").inc()
        await self._look()
        return True

    async def load(self, response_id: str) -> StoredResponse | None:
        """Raise ApiError when the bus is away."""
        try:
            data = await self._bucket.get(response_id)
        except RequestFailed as failure:
            self._loaded.labels("unavailable").inc()
            raise api_error(failure.reply) from failure
        self._loaded.labels("found" if data is not None else "missing").inc()
        if data is None:
            return None
        found = data
        try:
            return await self._work(len(found), lambda: unpack(found))
        except NotAResponse as problem:
            self._log.error("stored_response_broken", response=response_id, error=str(problem))
            return None

    async def delete(self, response_id: str) -> None:
        """Raise ApiError when the bus is away."""
        try:
            await self._bucket.delete(response_id)
        except RequestFailed as failure:
            raise api_error(failure.reply) from failure

    @staticmethod
    async def _work(size_bytes: int, work: Callable[[], T]) -> T:
        return work() if size_bytes <= INLINE_BYTES else await asyncio.to_thread(work)

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at < STATE_INTERVAL_S:
            return
        self._looked_at = now
        try:
            state = await self._bucket.state()
        except RequestFailed:
            return  # the next one tells
        self._bytes.set(state.total_bytes)
        self._entries.set(state.entries)


async def cluster_sealer(bus: Bus, configured: str) -> Sealer:
    """With the configured key, or with the one that the first frontend has put on the bus, however long that is away."""
    if configured:
        return Sealer(configured.encode())
    bucket = Bucket(bus, bus.subjects.secrets_bucket, BucketLimits())
    while True:
        try:
            key = await bucket.get(SEAL_KEY)
            if key is not None:
                return Sealer(key)
            await bucket.create(SEAL_KEY, secrets.token_bytes(SEAL_KEY_BYTES))
        except RequestFailed as failure:
            bus.log.warning("seal_key_unavailable", reason=str(failure))
            await asyncio.sleep(RETRY_PAUSE_S)
