"""The worker's side of kvbm: new blocks are written through in the background, known ones are onboarded before a request starts.

Whatever fails here costs a recompute and a metric, never a request. A block read back is used only if its checksum holds after it
was copied and the lease covered the whole copy.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_transfer.arena import Arena, ArenaError, checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import CommitBlocks, PinBlocks, PinnedBlocks, ReleaseLease, ReserveBlocks, ReservedBlocks, Slot
from kvbus_wire.packing import TOKEN_BYTES, pack_keys
from kvbus_wire.worker import Done
from kvbus_worker.adapters.kvbm_link import KvbmLink, Pool
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.offload import OffloadBatch, OffloadQueue
from kvbus_worker.core.onboard_rates import OnboardRates
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksStored, Engine, EngineError

TIER = "g2"
"""Where kvbm's arena is: what it pins lies there."""

_FAILURES = (RequestFailed, ArenaError, EngineError, IndexError)
Spawn = Callable[..., asyncio.Task[Any]]


class KvbmLimits(msgspec.Struct, frozen=True, kw_only=True):
    request_timeout_s: float
    onboard_timeout_s: float
    onboard_batch_blocks: int
    onboard_min_blocks: int
    onboard_max_blocks: int
    onboard_parallel: int
    offload_repair_s: float


class _Onboarding(msgspec.Struct):
    """``blocks`` imported so far; ``corrupt``: positions within the pinned run."""

    blocks: int = 0
    corrupt: tuple[int, ...] = ()


class Kvbm:
    """All methods run on the loop. ``spawn`` starts a task that the service owns."""

    def __init__(
        self,
        bus: Bus,
        link: KvbmLink,
        engine: Engine,
        store: TokenStore,
        queue: OffloadQueue,
        limits: KvbmLimits,
        *,
        instance_id: str,
        spawn: Spawn,
        metrics: WorkerMetrics,
    ) -> None:
        self._bus = bus
        self._link = link
        self._engine = engine
        self._store = store
        self._queue = queue
        self._limits = limits
        self._instance_id = instance_id
        self._spawn = spawn
        self._metrics = metrics
        self._block_bytes = engine.info.block_bytes
        self._block_size = engine.info.block_size
        self._wake = asyncio.Event()
        self._importing: set[bytes] = set()
        self._onboarding = 0
        self._next_repair = 0.0
        self.rates = OnboardRates()

    def start(self) -> None:
        self._spawn(self._link.run(), name="kvbm link")
        self._spawn(self._write_through(), name="kvbm write-through")
        self._spawn(self._after_attach(), name="kvbm attached")

    def close(self) -> None:
        self._link.close()

    def on_block_event(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                self._queue.push(event, self._importing)
                self._wake.set()
            case BlocksCleared():
                self._queue.clear()
        self._show_queue()

    def can_onboard(self, keys: Sequence[bytes]) -> bool:
        """Worth a try: kvbm is there and G1 does not have all of the chain."""
        if self._link.pool is None or len(keys) < self._limits.onboard_min_blocks:
            return False
        if len(keys) - self._engine.cached_blocks(keys) < self._limits.onboard_min_blocks:
            return False
        if self._onboarding >= self._limits.onboard_parallel:
            self._metrics.kvbm_skipped.inc()
            return False
        return True

    async def onboard(self, keys: Sequence[bytes], packed: bytes) -> int:
        """Bring the blocks that kvbm has beyond G1's into G1; how many tokens they hold. ``packed``: the tokens of the chain."""
        pool = self._link.pool
        if pool is None:
            return 0
        progress = _Onboarding()
        self._onboarding += 1
        try:
            async with asyncio.timeout(self._limits.onboard_timeout_s):
                await self._onboard(pool, keys, packed, progress)
        except TimeoutError:
            self._link.failed("onboard", RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "onboarding took too long"))
        except _FAILURES as error:
            self._link.failed("onboard", error)
        finally:
            self._onboarding -= 1
        return progress.blocks * self._block_size

    async def _onboard(self, pool: Pool, keys: Sequence[bytes], packed: bytes, progress: _Onboarding) -> None:
        loop = asyncio.get_running_loop()
        have = self._engine.cached_blocks(keys)
        asked_at = loop.time()
        asked = keys[have : have + self._limits.onboard_max_blocks]
        request = PinBlocks(pool_id=pool.pool_id, instance_id=self._instance_id, keys=pack_keys(asked))
        pinned: PinnedBlocks = await self._ask(pool, request, PinnedBlocks)
        if not pinned.lease_id:
            return
        wanted = asked[: len(pinned.slots)]
        self._importing.update(wanted)
        try:
            # Counted from before the request: kvbm's lease began later, so it ends later than this.
            await self._copy_in(
                pool, keys, packed, have, pinned.slots[: len(wanted)], asked_at + pinned.lease_s, progress
            )
        finally:
            self._importing.difference_update(wanted)
            self._spawn(self._release(pool, pinned.lease_id, progress.corrupt), name="kvbm release")
            self._metrics.kvbm_blocks.labels("onboard").inc(progress.blocks)
            self._metrics.kvbm_bytes.labels("onboard").inc(progress.blocks * self._block_bytes)
            took_s = loop.time() - asked_at
            self._metrics.kvbm_seconds.labels("onboard").inc(took_s)
            self.rates.observe(TIER, progress.blocks * self._block_size, took_s)

    async def _copy_in(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        packed: bytes,
        have: int,
        slots: Sequence[Slot],
        lease_end: float,
        progress: _Onboarding,
    ) -> None:
        size = self._block_size * TOKEN_BYTES
        for start in range(0, len(slots), self._limits.onboard_batch_blocks):
            part = slots[start : start + self._limits.onboard_batch_blocks]
            data = await asyncio.to_thread(_copy_out, pool.arena, part, self._block_bytes)
            if asyncio.get_running_loop().time() >= lease_end:
                raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "the lease ended during the copy")
            if len(data) < len(part):
                progress.corrupt = (start + len(data),)
                self._metrics.kvbm_failures.labels("onboard", "corrupt").inc()
            first = have + start
            end = first + len(data)
            tokens = [packed[i * size : (i + 1) * size] for i in range(first, end)]
            parent = keys[first - 1] if first else ROOT
            imported = 0
            if data:
                views = [memoryview(block) for block in data]
                imported = await self._engine.import_blocks(parent, keys[first:end], tokens, views)
                progress.blocks += imported
            if imported < len(part):
                return

    async def _release(self, pool: Pool, lease_id: str, corrupt: tuple[int, ...]) -> None:
        try:
            await self._ask(pool, ReleaseLease(lease_id=lease_id, corrupt=corrupt), Done)
        except RequestFailed as error:
            # The lease ends by itself; only the report of a corrupt block is lost, and its next reader will make it again.
            self._metrics.kvbm_failures.labels("release", str(error.code)).inc()

    async def _after_attach(self) -> None:
        """A kvbm that is new holds nothing: offer it what lies in G1, the beginnings of the chains first."""
        while True:
            await self._link.attached.wait()
            self._link.attached.clear()
            self._queue.offer(self._store.links())
            self._wake.set()

    async def _write_through(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (pool := self._link.pool) is not None and (batch := self._queue.take(self._store)) is not None:
                self._show_queue()
                try:
                    await self._offload(pool, batch)
                except _FAILURES as error:
                    self._link.failed("offload", error)
                    await asyncio.sleep(self._link.retry_s)

    async def _offload(self, pool: Pool, batch: OffloadBatch) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        request = ReserveBlocks(
            pool_id=pool.pool_id, instance_id=self._instance_id, parent=batch.parent, keys=pack_keys(batch.keys)
        )
        reserved: ReservedBlocks = await self._ask(pool, request, ReservedBlocks)
        chosen = [(i, slot) for i, slot in enumerate(reserved.slots[: len(batch.keys)]) if slot is not None]
        if not chosen:
            await self._repair(pool, batch)
            return
        checksums: list[int | None] = [None] * len(batch.keys)
        try:
            views = [pool.arena.view(slot.index)[: self._block_bytes] for _, slot in chosen]
            written = await self._engine.export_blocks([batch.keys[i] for i, _ in chosen], views)
            sums = await asyncio.to_thread(_checksums, views, written)
            if loop.time() >= asked_at + reserved.lease_s:
                raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "the lease ended during the copy")
        except _FAILURES:
            # Nothing is committed: that gives the slots back at once.
            await self._ask(pool, CommitBlocks(lease_id=reserved.lease_id, checksums=tuple(checksums)), Done)
            raise
        for (i, _), value in zip(chosen, sums, strict=True):
            checksums[i] = value
        await self._ask(pool, CommitBlocks(lease_id=reserved.lease_id, checksums=tuple(checksums)), Done)
        blocks = sum(value is not None for value in checksums)
        self._metrics.kvbm_blocks.labels("offload").inc(blocks)
        self._metrics.kvbm_bytes.labels("offload").inc(blocks * self._block_bytes)
        self._metrics.kvbm_seconds.labels("offload").inc(loop.time() - asked_at)

    async def _repair(self, pool: Pool, batch: OffloadBatch) -> None:
        """Nothing was wanted: kvbm has it all, or it lacks what the batch hangs on (it evicted that): then offer the whole chain.

        Not more often than each ``offload_repair_s``, since a kvbm without room would refuse it again and again.
        """
        now = asyncio.get_running_loop().time()
        if batch.parent == ROOT or now < self._next_repair:
            return
        request = PinBlocks(pool_id=pool.pool_id, instance_id=self._instance_id, keys=batch.parent)
        pinned: PinnedBlocks = await self._ask(pool, request, PinnedBlocks)
        if pinned.lease_id:
            await self._release(pool, pinned.lease_id, ())
            return
        self._next_repair = now + self._limits.offload_repair_s
        self._queue.push_chain(self._store.chain(batch.keys[-1]))

    def _ask(self, pool: Pool, request: Any, reply: type[Any]) -> Coroutine[Any, Any, Any]:
        return self._bus.request(pool.subject, request, reply, timeout_s=self._limits.request_timeout_s)

    def _show_queue(self) -> None:
        self._metrics.offload_waiting.set(len(self._queue))
        self._metrics.offload_dropped.set(self._queue.dropped)


def _copy_out(arena: Arena, slots: Sequence[Slot], block_bytes: int) -> list[bytes]:
    """Private copies of the leading slots whose checksum holds. The copy is checked: the slot may change under the reader."""
    copies: list[bytes] = []
    for slot in slots:
        copy = bytes(arena.view(slot.index)[:block_bytes])
        if checksum(copy) != slot.checksum:
            break
        copies.append(copy)
    return copies


def _checksums(views: Sequence[memoryview], written: Sequence[bool]) -> list[int | None]:
    return [checksum(view) if done else None for view, done in zip(views, written, strict=True)]
