"""Writing to the disk: one job at a time, and what follows from its end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvbus_blocks.retention import demotable
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
        # Growing was tried in vain not long ago.
        self._no_growth_until_s: dict[PoolSpec, float] = {}
        self._to_flush: dict[PoolSpec, Shelf] = {}

    def call(self, call: Callable[[Buffer], T]) -> "asyncio.Future[T]":
        """For the start and the end, when nothing else is written."""
        return asyncio.wrap_future(self._threads.submit(call))

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
            self._shelves.publish(shelf)
            future = self._start(job)
        except BaseException as error:
            try:
                self._settle(job, error)
            finally:
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
        known = [block for meta in blocks if (block := shelf.find(meta.key)) is not None]
        above = [block for meta in blocks if (block := shelf.find(meta.parent)) is not None]
        # Room for one block of a batch must not be made of another, nor of what it hangs on.
        job.held = known + above
        shelf.hold(job.held)
        for block, meta in zip(known, (meta for meta in blocks if shelf.find(meta.key)), strict=True):
            shelf.direct(block, meta.directive, now_s)
        shelf.use(known)
        wanted = self._wanted(shelf, blocks, data)
        # All the room first: then neighbours in the chain become neighbours on the disk.
        room = self._make_room(job, len(wanted))
        results: list[DiskBlock | None] = []
        for meta, memory in zip(blocks, data, strict=True):
            block = shelf.find(meta.key)
            if block is None and room > 0 and meta.key in wanted and shelf.is_placeable(meta.parent):
                room -= 1
                block = shelf.place(meta, now_s)
                job.blocks.append(block)
                job.data.append(memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory)
            self._counters.refused += block is None
            results.append(block)
        return results

    @staticmethod
    def _wanted(shelf: Shelf, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> set[bytes]:
        """The new blocks that may lie here, if there is room."""
        wanted: set[bytes] = set()
        for meta, memory in zip(blocks, data, strict=True):
            is_new = shelf.find(meta.key) is None and memory.nbytes == shelf.spec.block_bytes
            is_below = meta.parent in wanted or shelf.is_placeable(meta.parent)
            if is_new and is_below and demotable(meta.directive):
                wanted.add(meta.key)
        return wanted

    def _make_room(self, job: WriteJob, wanted: int) -> int:
        """How many of the wanted slots there are in the end."""
        shelf = job.shelf
        while (missing := wanted - shelf.free_slots) > 0:
            if self._grow(job):
                continue
            evicted = sum(1 for _ in range(missing) if shelf.evict(self._clock()))
            if evicted < missing:
                break
        return min(wanted, shelf.free_slots)

    def _grow(self, job: WriteJob) -> bool:
        now_s = self._clock()
        if now_s < self._no_growth_until_s.get(job.shelf.spec, now_s):
            return False
        space = self._shelves.space
        segment = space.grow(job.shelf)
        while segment is None:
            victim = space.victim(job.shelf, now_s)
            if victim is None:
                self._no_growth_until_s[job.shelf.spec] = now_s + self._limits.rest_s
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
        future = asyncio.wrap_future(self._threads.submit(job.run))
        future.add_done_callback(lambda done: self._finish(job, done))
        return future

    async def _wait(self, job: WriteJob, future: "asyncio.Future[None]", timeout_s: float) -> None:
        try:
            await asyncio.wait((future,), timeout=max(0.0, timeout_s))
        finally:
            if not future.done():
                job.abandon()
        if future.done():
            self._finish(job, future)  # its own callback may not have run yet
        else:
            job.is_late = True
            self._counters.failures += 1
            self.breaker.failed(self._clock(), at_once=True)
            self._log.warning("g3_write_hangs", blocks=len(job.blocks))

    def _finish(self, job: WriteJob, future: "asyncio.Future[None]") -> None:
        """Also of a job for which nobody waits any more. Idempotent."""
        if job.is_over:
            return
        job.is_over = True
        error = future.exception()
        try:
            self._settle(job, error)
            self._judge(job, error)
        finally:
            self._go_on()

    def _settle(self, job: WriteJob, error: BaseException | None) -> None:
        """What lies on the disk now."""
        shelf = job.shelf
        if not job.pending_done:
            shelf.put_back(job.pending)
        self._shelves.closing += job.closed[job.closed_done :]
        kept = 0
        for at, block in enumerate(job.blocks):
            if error is None and at in job.records:
                shelf.keep(block, job.records[at])
                kept += 1
            else:
                shelf.give_up(block, perhaps_recorded=job.perhaps_recorded and at in job.records)
        self._counters.stored += kept
        self._counters.corrupt += len(job.spoiled)
        self._counters.written_bytes += kept * shelf.spec.block_bytes
        shelf.let_go(job.held)
        for segment in job.segments:
            if segment.number not in job.made:
                shelf.remove_segment(segment)
        self._shelves.publish(shelf)

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
            self._no_growth_until_s[job.shelf.spec] = now_s + self._limits.rest_s
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
