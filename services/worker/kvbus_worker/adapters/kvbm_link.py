"""Finding the kvbm of this host and mapping its pool, again after each restart of it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from kvbus_runtime.bus import Bus
from kvbus_runtime.discovery import Directory
from kvbus_runtime.errors import RequestFailed
from kvbus_transfer.arena import Arena, ArenaError
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import AttachedPool, AttachPool
from kvbus_wire.records import InstanceRecord
from kvbus_worker.adapters.metrics import WorkerMetrics


class Pool(msgspec.Struct, frozen=True, eq=False):
    """A mapped pool of one incarnation of kvbm. ``lower_tiers``: those below G2, from above."""

    subject: str
    instance_id: str
    incarnation: int
    pool_id: str
    arena: Arena
    lower_tiers: tuple[str, ...] = ()


class KvbmLink:
    """``pool`` is None while there is no kvbm, or it is left alone after a failure."""

    def __init__(
        self, bus: Bus, directory: Directory, request: AttachPool, *, host_id: str, timeout_s: float, retry_s: float,
        metrics: WorkerMetrics, log: Any,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._directory = directory
        self._request = request
        self._host_id = host_id
        self._timeout_s = timeout_s
        self.retry_s = retry_s
        self._metrics = metrics
        self._log = log
        self._pool: Pool | None = None
        self._rest_until = 0.0
        self._changed = asyncio.Event()
        self.attached = asyncio.Event()
        directory.on_change(self._on_change)

    @property
    def instance_id(self) -> str:
        return self._request.instance_id

    @property
    def pool(self) -> Pool | None:
        return self._pool if asyncio.get_running_loop().time() >= self._rest_until else None

    @property
    def is_attached(self) -> bool:
        """Also while it is left alone."""
        return self._pool is not None

    @property
    def rests_s(self) -> float:
        """How much longer it is left alone."""
        return max(self._rest_until - asyncio.get_running_loop().time(), 0.0)

    def ask(self, pool: Pool, request: Any, reply: type[Any], *, wait_s: float = 0.0) -> Coroutine[Any, Any, Any]:
        """``wait_s``: how long kvbm itself may wait before it answers."""
        return self._bus.request(pool.subject, request, reply, timeout_s=self._timeout_s + wait_s)

    async def run(self) -> None:
        """Keep the link for as long as the task lives."""
        while True:
            self._changed.clear()
            wanted = self._find()
            if self._pool is not None and not _is_same(self._pool, wanted):
                self._detach()
            failed = False
            if wanted is not None and self._pool is None:
                failed = not await self._attach(wanted)
            try:
                async with asyncio.timeout(self.retry_s if failed else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def failed(self, operation: str, error: Exception) -> None:
        """Count a failure and leave kvbm alone for a while; map the pool anew when kvbm does not know it any more."""
        reason = str(error.code) if isinstance(error, RequestFailed) else type(error).__name__
        self._metrics.kvbm_failures.labels(operation, reason).inc()
        self._log.warning("kvbm_failed", operation=operation, reason=reason, error=str(error))
        self._rest_until = asyncio.get_running_loop().time() + self.retry_s
        if isinstance(error, RequestFailed) and error.code is ErrorCode.GONE:
            self._detach()
            asyncio.get_running_loop().call_later(self.retry_s, self._changed.set)

    def close(self) -> None:
        self._detach()

    def _on_change(self, record: InstanceRecord, change: str) -> None:
        if record.service == "kvbm" and record.host_id == self._host_id:
            self._changed.set()

    def _find(self) -> InstanceRecord | None:
        here = [r for r in self._directory.instances("kvbm") if r.host_id == self._host_id and not r.draining]
        return min(here, key=lambda record: record.instance_id, default=None)

    async def _attach(self, record: InstanceRecord) -> bool:
        subject = self._bus.subjects.kvbm(record.instance_id)
        try:
            reply: AttachedPool = await self._bus.request(
                subject, self._request, AttachedPool, timeout_s=self._timeout_s
            )
            if reply.slot_bytes < self._request.block_bytes:
                raise RequestFailed.of(ErrorCode.UNSUPPORTED, f"slots of {reply.slot_bytes} bytes are too small")
            arena = await asyncio.to_thread(Arena.open, reply.path, reply.slot_bytes, reply.slots)
        except (RequestFailed, ArenaError) as error:
            self.failed("attach", error)
            return False
        lower = _tiers_below(record)
        self._pool = Pool(subject, record.instance_id, record.incarnation, reply.pool_id, arena, lower)
        self._rest_until = 0.0
        self._metrics.kvbm_attached.set(1)
        self._log.info("kvbm_attached", kvbm=record.instance_id, pool=reply.pool_id, slots=reply.slots)
        self.attached.set()
        return True

    def _detach(self) -> None:
        if self._pool is not None:
            self._pool.arena.close()
            self._pool = None
            self._metrics.kvbm_attached.set(0)
            self._log.info("kvbm_detached")


def _tiers_below(record: InstanceRecord) -> tuple[str, ...]:
    if record.kvbm is None:
        return ()
    there = {"g3": record.kvbm.g3_bytes, "g4": record.kvbm.g4_store}
    return tuple(tier for tier, has in there.items() if has)


def _is_same(pool: Pool, record: InstanceRecord | None) -> bool:
    return record is not None and (pool.instance_id, pool.incarnation) == (record.instance_id, record.incarnation)
