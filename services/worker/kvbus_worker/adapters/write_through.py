"""New blocks of G1 are written through to kvbm in the background, in batches, oldest first.

It must not be felt by decoding: blocks are gathered for a moment, so that the engine is asked once for many of them, and checksums
are computed in a thread of low priority.
"""

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_runtime.errors import RequestFailed
from kvbus_transfer.arena import checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import CommitBlocks, PinBlocks, PinnedBlocks, ReleaseLease, ReserveBlocks, ReservedBlocks
from kvbus_wire.packing import pack_keys
from kvbus_wire.worker import Done
from kvbus_worker.adapters.kvbm_link import KvbmLink, Pool
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.onboarding import FAILURES
from kvbus_worker.core.offload import OffloadBatch, OffloadQueue
from kvbus_worker.core.pin_wishes import PinWishes
from kvbus_worker.core.retention import on_the_wire, worth_saying
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksStored, Engine

_NICENESS = 10


class WriteThroughLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``gather_s``: how long new blocks wait for others, unless there are ``batch_blocks``."""

    gather_s: float
    batch_blocks: int
    repair_s: float


class WriteThrough:
    """``importing``: blocks that come from kvbm just now."""

    def __init__(
        self, engine: Engine, link: KvbmLink, store: TokenStore, queue: OffloadQueue, limits: WriteThroughLimits,
        importing: set[bytes], *, metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._link = link
        self._store = store
        self._queue = queue
        self._limits = limits
        self._importing = importing
        self._metrics = metrics
        self._block_bytes = engine.info.block_bytes
        self.wishes = PinWishes(engine.info.total_blocks)
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._is_ending = False
        self._next_repair = 0.0
        self._thread = ThreadPoolExecutor(1, "kvbm-write-through", initializer=_be_nice)

    def on_block_event(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                self._queue.push(event, self._importing)
                self._work()
            case BlocksCleared():
                self._queue.clear()
        self._show_queue()

    async def settle(self) -> None:
        """Nothing new is to come: gather no more. Return when all is written through, or there is no kvbm."""
        self._is_ending = True
        self._wake.set()
        await self._settled.wait()

    def _work(self) -> None:
        if len(self._queue):
            self._settled.clear()
            self._wake.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def offer_all(self) -> None:
        """A kvbm that is new holds nothing: offer it what lies in G1, the beginnings of the chains first."""
        while True:
            await self._link.attached.wait()
            self._link.attached.clear()
            self._queue.offer(self._store.links())
            self._work()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            await self._gather()
            while len(self._queue) and self._link.is_attached:
                pool = self._link.pool
                if (
                    pool is None
                ):  # it is left alone, perhaps for somebody else's failure: nobody would wake this up again
                    await asyncio.sleep(self._link.rests_s)
                    continue
                batch = self._queue.take(self._store)
                self._show_queue()
                if batch is None:
                    continue
                try:
                    await self._offload(pool, batch)
                except FAILURES as error:
                    self._link.failed("offload", error)
                    if isinstance(error, RequestFailed) and error.retryable:
                        self._queue.put_back(batch)
                        self._show_queue()
            self._settled.set()

    async def _gather(self) -> None:
        """A batch is full, or the oldest block has waited long enough."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.gather_s):
                while len(self._queue) < self._limits.batch_blocks and not self._is_ending:
                    self._wake.clear()
                    await self._wake.wait()
        self._wake.clear()

    async def _offload(self, pool: Pool, batch: OffloadBatch) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        now_s = time.monotonic()
        held = self.wishes.with_wishes(batch.keys, self._engine.directives(batch.keys), now_s)
        request = ReserveBlocks(
            pool_id=pool.pool_id,
            instance_id=self._link.instance_id,
            parent=batch.parent,
            keys=pack_keys(batch.keys),
            directives=on_the_wire(worth_saying(held), now_s),
        )
        reserved: ReservedBlocks = await self._link.ask(pool, request, ReservedBlocks)
        chosen = [(i, slot) for i, slot in enumerate(reserved.slots[: len(batch.keys)]) if slot is not None]
        if not chosen:
            await self._repair(pool, batch)
            return
        checksums: list[int | None] = [None] * len(batch.keys)
        try:
            views = [pool.arena.view(slot.index)[: self._block_bytes] for _, slot in chosen]
            written = await self._engine.export_blocks([batch.keys[i] for i, _ in chosen], views)
            sums = await loop.run_in_executor(self._thread, _checksums, views, written)
            if loop.time() >= asked_at + reserved.lease_s:
                raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "the lease ended during the copy")
        except FAILURES:
            # Nothing is committed: that gives the slots back at once.
            await self._commit(pool, reserved.lease_id, checksums)
            raise
        for (i, _), value in zip(chosen, sums, strict=True):
            checksums[i] = value
        self._queue.evicted += sum(not done for done in written)
        self._show_queue()
        if not await self._commit(pool, reserved.lease_id, checksums):
            return
        blocks = sum(value is not None for value in checksums)
        self._metrics.kvbm_blocks.labels("offload").inc(blocks)
        self._metrics.kvbm_bytes.labels("offload").inc(blocks * self._block_bytes)
        self._metrics.kvbm_seconds.labels("offload").inc(loop.time() - asked_at)

    async def _commit(self, pool: Pool, lease_id: str, checksums: Sequence[int | None]) -> bool:
        """False: the lease was gone. That says nothing of the pool, which the next batch finds out about."""
        try:
            await self._link.ask(pool, CommitBlocks(lease_id=lease_id, checksums=tuple(checksums)), Done)
        except RequestFailed as error:
            if error.code is not ErrorCode.GONE:
                raise
            self._metrics.kvbm_failures.labels("commit", str(error.code)).inc()
            return False
        return True

    async def _repair(self, pool: Pool, batch: OffloadBatch) -> None:
        """Nothing was wanted: kvbm has it all, or it lacks what the batch hangs on (it evicted that): then offer the whole chain.

        Not more often than each ``repair_s``, since a kvbm without room would refuse it again and again.
        """
        now = asyncio.get_running_loop().time()
        if batch.parent == ROOT or now < self._next_repair:
            return
        request = PinBlocks(pool_id=pool.pool_id, instance_id=self._link.instance_id, keys=batch.parent)
        pinned: PinnedBlocks = await self._link.ask(pool, request, PinnedBlocks)
        if pinned.lease_id:
            with suppress(RequestFailed):  # it ends by itself
                await self._link.ask(pool, ReleaseLease(lease_id=pinned.lease_id), Done)
            return
        self._next_repair = now + self._limits.repair_s
        self._queue.push_chain(self._store.chain(batch.keys[-1]))

    def _show_queue(self) -> None:
        self._metrics.offload_waiting.set(len(self._queue))
        self._metrics.offload_dropped.set(self._queue.dropped)
        self._metrics.offload_evicted.set(self._queue.evicted)


def _be_nice() -> None:
    with suppress(OSError):  # not everywhere may a thread be made to yield
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _checksums(views: Sequence[memoryview], written: Sequence[bool]) -> list[int | None]:
    return [checksum(view) if done else None for view, done in zip(views, written, strict=True)]
