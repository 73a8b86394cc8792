"""Writing to the disk: one job at a time, and what follows from its end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvbus_kvbm.adapters.disk.calls import is_full
from kvbus_kvbm.adapters.disk.lane import Lane
from kvbus_kvbm.adapters.disk.shelves import Shelves
from kvbus_kvbm.adapters.disk.threads import Buffer, IoThreads
from kvbus_kvbm.adapters.disk.writing import Abandoned, WriteJob, rewrite_journal
from kvbus_kvbm.core.breaker import Breaker
from kvbus_kvbm.core.disk_blocks import DiskBlock
from kvbus_kvbm.core.disk_shelf import Shelf
from kvbus_kvbm.core.disk_space import DiskLimits
from kvbus_kvbm.core.lower import BlockMeta, TierCounters
from kvbus_kvbm.core.pools import PoolSpec

T = TypeVar("T")


class Writes:
    """Who holds the lane has a job under way, or plans one. A job that hangs keeps it; the others then wait to their deadlines."""

    def __init__(
        self, shelves: Shelves, limits: DiskLimits, counters: TierCounters, clock: Callable[[], float], log: Any
    ) -> None:
        self.breaker = Breaker(
            failures=limits.failures, rest_s=limits.rest_s, trial_s=2 * limits.deadline_s + limits.rest_s
        )
        self._shelves = shelves
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._log = log
        self._threads = IoThreads("g3-write", 1)
        self._lane = Lane(limits.max_waiting)
        self._no_growth_until_s = 0.0
        self._to_flush: dict[PoolSpec, Shelf] = {}

    async def call(self, call: Callable[[Buffer], T]) -> T:
        """For the start and the end, when nothing else is written."""
        return await asyncio.wrap_future(self._threads.submit(call))

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        started_s = self._clock()
        refused = [False] * len(blocks)
        allowed_s = self._limits.allowed_s(len(blocks) * spec.block_bytes)
        if not await self._enter(allowed_s):
            self._counters.refused += len(blocks)
            return refused
        shelf = self._shelves.get(spec)
        job = self._new_job(shelf)
        try:
            results = self._plan(job, blocks, data)
            future = self._start(job)
        except BaseException:
            self._lane.leave()
            raise
        await self._wait(job, future, started_s + allowed_s - self._clock())
        self._counters.write_s += self._clock() - started_s
        return [block is not None and block.kept and not block.detached for block in results]

    async def flush(self, shelf: Shelf) -> bool:
        """What is pending reaches the journal. False: not by its deadline."""
        allowed_s = self._limits.deadline_s
        if not shelf.pending:
            return True
        if not await self._enter(allowed_s):
            return False
        job = self._new_job(shelf)
        await self._wait(job, self._start(job), allowed_s)
        return not shelf.pending

    def flush_soon(self, shelf: Shelf) -> None:
        if shelf.pending:
            self._to_flush[shelf.spec] = shelf
            if self.breaker.is_closed and self._lane.try_enter():
                self._go_on()

    async def settle(self) -> bool:
        """Everything pending is written. False: something hangs."""
        for shelf in self._shelves:
            if not await self.flush(shelf) and self._lane.is_taken:
                return False
        return await self._lane.enter(self._limits.deadline_s)

    def stop(self) -> None:
        self._threads.stop()

    async def _enter(self, timeout_s: float) -> bool:
        if not self.breaker.passes(self._clock()):
            return False
        opened = self.breaker.opened
        if not await self._lane.enter(timeout_s):
            return False
        if self.breaker.opened != opened:  # while we waited
            self._lane.leave()
            return False
        return True

    def _new_job(self, shelf: Shelf) -> WriteJob:
        place = self._shelves.place
        return WriteJob(place.calls, self._shelves.files(shelf), shelf, self._limits.io_bytes)

    def _plan(self, job: WriteJob, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[DiskBlock | None]:
        """Places for the new blocks. The answer: the block of each position, None without room."""
        shelf = job.shelf
        shelf.in_use = True
        now_s = self._clock()
        shelf.begin_use()
        results: list[DiskBlock | None] = []
        for meta, memory in zip(blocks, data, strict=True):
            block = shelf.find(meta.key)
            if block is not None:
                shelf.direct(block, meta.directive, now_s)
                shelf.use([block])
            elif meta.directive.kind != "ephemeral" and memory.nbytes == shelf.spec.block_bytes:
                block = self._place(job, meta)
                if block is not None:
                    job.blocks.append(block)
                    job.data.append(memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory)
            if block is None:
                self._counters.refused += 1
            else:
                # Room for one block of a batch must not be made of another.
                shelf.hold([block])
                job.held.append(block)
            results.append(block)
        return results

    def _place(self, job: WriteJob, meta: BlockMeta) -> DiskBlock | None:
        shelf = job.shelf
        if not shelf.is_placeable(meta.parent):
            return None
        parent = shelf.find(meta.parent)
        held = [] if parent is None else [parent]
        shelf.hold(held)
        has_room = shelf.has_free_slot or self._grow(job) or shelf.evict(self._clock())
        block = shelf.place(meta, self._clock()) if has_room else None
        shelf.let_go(held)
        return block

    def _grow(self, job: WriteJob) -> bool:
        now_s = self._clock()
        if now_s < self._no_growth_until_s:
            return False
        space = self._shelves.space
        segment = space.grow(job.shelf)
        while segment is None:
            victim = space.victim(job.shelf, now_s)
            if victim is None:
                return False
            self._shelves.give_up(*victim)
            self._to_flush[victim[0].spec] = victim[0]
            self._shelves.publish(victim[0])
            segment = space.grow(job.shelf)
        job.segments.append(segment)
        return True

    def _start(self, job: WriteJob) -> "asyncio.Future[None]":
        job.pending = job.shelf.take_pending()
        job.closed, self._shelves.closing = self._shelves.closing, []
        self._to_flush.pop(job.shelf.spec, None)
        self._shelves.publish(job.shelf)
        future = asyncio.wrap_future(self._threads.submit(job.run))
        future.add_done_callback(lambda done: self._finish(job, done))
        return future

    async def _wait(self, job: WriteJob, future: "asyncio.Future[None]", timeout_s: float) -> None:
        try:
            await asyncio.wait((future,), timeout=max(0.0, timeout_s))
        finally:
            if not future.done():
                job.abandon()
        if not future.done():
            job.is_late = True
            self._counters.failures += 1
            self.breaker.failed(self._clock(), at_once=True)
            self._log.warning("g3_write_hangs", blocks=len(job.blocks))

    def _finish(self, job: WriteJob, future: "asyncio.Future[None]") -> None:
        """Also of a job for which nobody waits any more."""
        shelf, error = job.shelf, future.exception()
        if not job.pending_done:
            shelf.put_back(job.pending)
        self._shelves.closing += job.closed[job.closed_done :]
        kept = 0
        for at, block in enumerate(job.blocks):
            if error is None and at not in job.spoiled:
                shelf.keep(block)
                kept += 1
            else:
                shelf.give_up(block, perhaps_recorded=job.perhaps_recorded and at not in job.spoiled)
        self._counters.stored += kept
        self._counters.corrupt += len(job.spoiled)
        self._counters.written_bytes += kept * shelf.spec.block_bytes
        shelf.let_go(job.held)
        for segment in job.segments:
            if segment.number not in job.made:
                shelf.remove_segment(segment)
        self._shelves.publish(shelf)
        self._judge(job, error)
        self._go_on()

    def _judge(self, job: WriteJob, error: BaseException | None) -> None:
        now_s = self._clock()
        if error is None:
            if not job.is_late:
                self.breaker.succeeded()
            return
        if isinstance(error, Abandoned):
            return
        self._log.warning("g3_write_failed", error=repr(error), blocks=len(job.blocks))
        if is_full(error) and len(job.made) < len(job.segments):
            # The disk works, it is only full: from now on room is made by eviction.
            self._no_growth_until_s = now_s + self._limits.rest_s
            return
        self._counters.failures += 1
        if not job.is_late:
            self.breaker.failed(now_s)

    def _go_on(self) -> None:
        """With the lane: what is to be done before the next may have it."""
        if self.breaker.is_closed:
            for shelf in self._shelves:
                if self._shelves.files(shelf).journal.needs_rewriting(len(shelf)):
                    rewrite = rewrite_journal(self._shelves.files(shelf), shelf, shelf.by_use())
                    future = asyncio.wrap_future(self._threads.submit(rewrite))
                    future.add_done_callback(self._finish_rewriting)
                    return
            while self._to_flush:
                _, shelf = self._to_flush.popitem()
                if shelf.pending:
                    self._start(self._new_job(shelf))
                    return
        self._lane.leave()

    def _finish_rewriting(self, future: "asyncio.Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._log.warning("g3_journal_not_rewritten", error=repr(error))
        self._go_on()
