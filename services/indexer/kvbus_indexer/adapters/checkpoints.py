"""Saves the content to the object store, and starts from what was saved last.

Replicas share their checkpoints: who finds that another one has saved since it looked last leaves it at that. Order is that of the
store, so no clock matters. What cannot be used (half written, damaged, of a former stream, older than the stream reaches back) is
passed over, and the one before it is tried; without any the stream is read from its beginning.
"""

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from kvbus_indexer.core import checkpoint
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.checkpoint import Pause
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import ObjectFailed, RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.jetstream import StreamInfo
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.object_bucket import ObjectBucket, ObjectInfo
from kvbus_wire.checkpoint import CheckpointHeader, read_checkpoint
from kvbus_wire.message import DecodeFailed


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``interval_s``: 0 switches saving off."""

    interval_s: float
    keep: int
    max_bytes: int
    max_age_s: float


class Checkpoints:
    """``stream``: when the stream that is being read was made, empty before it is."""

    def __init__(
        self,
        catalog: Catalog,
        bus: Bus,
        settings: CheckpointSettings,
        *,
        indexer_id: str,
        stream: Callable[[], str],
        rng: Random,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._catalog = catalog
        self._events = EventLog(bus)
        # One more than are kept has to fit, since the oldest goes when the newest is whole.
        self._bucket = ObjectBucket(
            bus,
            bus.subjects.checkpoints_bucket,
            max_bytes=settings.max_bytes,
            store_bytes=(settings.keep + 1) * settings.max_bytes,
            max_age_s=settings.max_age_s,
        )
        self._settings = settings
        self._indexer_id = indexer_id
        self._stream = stream
        self._rng = rng
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._seen_revision = 0
        self._saved_at: float | None = None
        self._saved_position = -1
        self._counted = metrics.counter("checkpoints", "checkpoints by what became of them", ("what",))
        self._seconds = metrics.histogram("checkpoint_seconds", "time to save a checkpoint")
        self._size = metrics.gauge("checkpoint_bytes", "size of the last checkpoint saved")

    @property
    def age_s(self) -> float | None:
        """Since this replica has saved, or found that another one has."""
        return None if self._saved_at is None else self._clock() - self._saved_at

    # -- at the start

    async def restore(self) -> CheckpointHeader | None:
        """Enter the newest content that can be used; the events behind its ``stream_seq`` have to follow. None: there is none."""
        try:
            info = await self._events.info()
            for version in await self._bucket.newest() if info is not None else []:
                self._seen_revision = max(self._seen_revision, version.revision)
                header = await self._restore_one(version, info)
                if header is not None:
                    return header
        except RequestFailed as failure:
            self._count("unreachable", reason=str(failure))
        return None

    async def _restore_one(self, version: ObjectInfo, info: StreamInfo | None) -> CheckpointHeader | None:
        try:
            header, feeds = read_checkpoint(await self._bucket.get(version.name))
            if info is None or not _reaches(info, header):
                self._count("not_in_stream", checkpoint=version.name)
                return None
            self._catalog.begin_restore(header.stream_seq)
            for feed in feeds:
                for _pause in checkpoint.restore(self._catalog, feed, self._clock()):
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
        except (DecodeFailed, ObjectFailed) as problem:
            self._catalog.forget()
            self._count("unusable", checkpoint=version.name, reason=str(problem))
            return None
        self._count("restored")
        entries = self._catalog.content.entries
        self._log.info("checkpoint_restored", checkpoint=version.name, entries=entries, position=header.stream_seq)
        return header

    # -- from then on

    async def run(self) -> None:
        """Save now and then; replicas that started together do so at different times."""
        while True:
            await asyncio.sleep(self._settings.interval_s * self._rng.uniform(0.75, 1.25))
            if not self._catalog.caught_up:
                continue
            try:
                await self.save()
            except (ObjectFailed, RequestFailed) as problem:
                self._count("failed", reason=str(problem))

    async def save(self) -> None:
        """Save, unless nothing has changed or a replica has saved. Raise RequestFailed or ObjectFailed (too_large)."""
        versions = await self._bucket.newest()
        newest = versions[0].revision if versions else 0
        if newest != self._seen_revision:
            self._seen_revision = newest
            self._saved_at, self._saved_position = self._clock(), -1
            self._counted.labels("saved_by_other").inc()
            return
        is_fresh = self._saved_at is not None and self._clock() - self._saved_at < self._settings.max_age_s / 2
        if is_fresh and self._saved_position == self._catalog.repairs.position:
            return
        await self._save(versions)

    async def _save(self, versions: list[ObjectInfo]) -> None:
        started = self._clock()
        saved_ms = time.time_ns() // 1_000_000
        name = f"{saved_ms:015d}-{self._indexer_id}"
        position = self._catalog.repairs.position
        data = bytearray()
        parts = checkpoint.save(self._catalog, stream=self._stream(), indexer_id=self._indexer_id, saved_ms=saved_ms)
        for part in parts:
            if not isinstance(part, Pause):
                data += part
                if len(data) > self._settings.max_bytes:
                    raise ObjectFailed(name, "too_large")
            await asyncio.sleep(0)
        await self._bucket.put(name, bytes(data))
        written = await self._bucket.info(name)
        self._seen_revision = written.revision if written is not None else 0
        self._saved_at, self._saved_position = self._clock(), position
        self._seconds.observe(self._clock() - started)
        self._size.set(len(data))
        self._counted.labels("saved").inc()
        for old in versions[self._settings.keep - 1 :]:
            await self._bucket.remove(old)

    def _count(self, what: str, **fields: object) -> None:
        self._counted.labels(what).inc()
        if fields:
            self._log.warning(f"checkpoint_{what}", **fields)


def _reaches(info: StreamInfo, header: CheckpointHeader) -> bool:
    """Whether the stream is the same, and still holds every message behind the checkpoint."""
    state = info.state
    return info.created == header.stream and state.first_seq - 1 <= header.stream_seq <= state.last_seq
