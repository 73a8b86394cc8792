"""AttachPool: find the pool for a worker's blocks, or make it."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Coroutine
from typing import Any, Protocol

from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.core.errors import KvbmError
from kvbus_kvbm.core.pools import OpenPool, Pools, PoolSpec
from kvbus_wire.kvbm import AttachedPool, AttachPool


class Spawn(Protocol):
    def __call__(
        self, coro: Coroutine[Any, Any, AttachedPool | KvbmError], *, name: str
    ) -> asyncio.Task[AttachedPool | KvbmError]:
        """Start a task that belongs to the service."""


class Attaching:
    """One pool is made at a time, so that the budget holds. ``opened`` and ``closing`` tell of pools that come and go; ``unused``
    returns when kvbm itself has no use of the pool's memory any more."""

    def __init__(
        self,
        pools: Pools,
        arenas: Arenas,
        *,
        live: Callable[[], Container[str]],
        opened: Callable[[OpenPool], None],
        unused: Callable[[str], Awaitable[None]],
        closing: Callable[[OpenPool], None],
        changed: Callable[[OpenPool], None],
        absent_grace_s: float,
        clock: Callable[[], float],
        spawn: Spawn,
        log: Any,
    ) -> None:
        self._pools = pools
        self._arenas = arenas
        self._live = live
        self._opened = opened
        self._unused = unused
        self._closing = closing
        self._changed = changed
        self._absent_grace_s = absent_grace_s
        self._clock = clock
        self._spawn = spawn
        self._log = log
        self._lock = asyncio.Lock()

    async def attach(self, request: AttachPool) -> AttachedPool:
        """Idempotent. A request that waits for a pool being made, and is sent again, finds it. Raise KvbmError.

        Making a pool goes on when the asker's deadline has passed and this call is cancelled: broken off, it would leave its memory
        behind, and the asker, coming again, would find no room.
        """
        outcome = await asyncio.shield(self._spawn(self._outcome(request), name="attach pool"))
        if isinstance(outcome, KvbmError):
            raise outcome
        return outcome

    async def _outcome(self, request: AttachPool) -> AttachedPool | KvbmError:
        try:
            return await self._attach(request)
        except KvbmError as error:
            return error

    async def _attach(self, request: AttachPool) -> AttachedPool:
        spec = PoolSpec(request.model, request.kv_layout, request.block_bytes, request.block_size)
        async with self._lock:
            pool = self._pools.find(spec) or await self._make(spec)
            self._pools.attach(pool, request.instance_id, request.incarnation, self._clock())
            # All of them: a worker that was started anew has lost its leases everywhere.
            for other in self._pools:
                self._changed(other)
        self._log.info("pool_attached", pool=pool.pool_id, worker=request.instance_id, model=spec.model)
        return AttachedPool(
            pool_id=pool.pool_id, path=pool.path, slot_bytes=pool.spec.slot_bytes, slots=pool.pool.slots
        )

    async def _make(self, spec: PoolSpec) -> OpenPool:
        self._pools.detach_absent(self._live(), self._clock(), self._absent_grace_s)
        try:
            plan = self._pools.plan(spec)
            for pool_id in plan.reclaim:
                await self._give_up(pool_id)
            path = await self._arenas.create(plan)
        except KvbmError as error:
            self._log.warning("pool_refused", model=spec.model, reason=str(error), **error.details)
            raise
        pool = self._pools.add(plan, path)
        self._opened(pool)
        self._log.info(
            "pool_opened", pool=pool.pool_id, model=spec.model, slots=plan.slots, size_bytes=plan.size_bytes, path=path
        )
        return pool

    async def _give_up(self, pool_id: str) -> None:
        pool = self._pools.remove(pool_id)
        await self._unused(pool_id)
        pool.pool.clear()
        self._closing(pool)
        await self._arenas.remove(pool_id)
        self._log.info("pool_reclaimed", pool=pool_id, model=pool.spec.model)
