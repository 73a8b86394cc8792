"""Reading from the disk, in pieces that several threads work on."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvbus_kvbm.adapters.disk.reading import PieceResult, ReadPiece, Target
from kvbus_kvbm.adapters.disk.shelves import Shelves
from kvbus_kvbm.adapters.disk.threads import IoThreads
from kvbus_kvbm.core.breaker import Breaker
from kvbus_kvbm.core.disk_blocks import DiskBlock
from kvbus_kvbm.core.disk_shelf import Shelf
from kvbus_kvbm.core.disk_space import DiskLimits
from kvbus_kvbm.core.lower import BlockMeta, TierCounters


class _Read:
    """One read on its way: what became of each block."""

    def __init__(self, shelf: Shelf, into: Sequence[memoryview] | None) -> None:
        self.shelf = shelf
        self.target = Target(into)
        self.good: set[int] = set()
        self.dropped: list[bytes] = []
        self.is_over = False
        self.has_failed = False


class Reads:
    """See the module."""

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
        self._threads = IoThreads("g3-read", limits.read_threads)
        self._in_flight: set[asyncio.Future[PieceResult]] = set()
        self._reading = 0

    async def read(self, shelf: Shelf, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        run = shelf.run(keys[: len(into)])
        read = _Read(shelf, into)
        is_tried = bool(run) and await self._carry_out(read, run)
        count = 0
        while is_tried and count in read.good:
            count += 1
        self._counters.hits += count
        self._counters.misses += len(keys) - count
        shelf.begin_use()
        shelf.use(block for block in run[:count] if not block.detached)
        return [block.meta for block in run[:count]]

    async def verify(self, shelf: Shelf, keys: Sequence[bytes]) -> list[bytes]:
        found = [block for block in map(shelf.find, dict.fromkeys(keys)) if block is not None and block.kept]
        read = _Read(shelf, None)
        if found:
            await self._carry_out(read, found)
        return read.dropped

    async def settle(self) -> bool:
        """Wait for what is under way. False: it hangs."""
        if self._in_flight:
            await asyncio.wait(tuple(self._in_flight), timeout=self._limits.deadline_s)
        return not self._in_flight

    def stop(self) -> None:
        self._threads.stop()

    async def _carry_out(self, read: _Read, blocks: Sequence[DiskBlock]) -> bool:
        """False: not even tried. To its deadline."""
        started_s = self._clock()
        if self._reading >= self._limits.max_waiting or not self.breaker.passes(started_s):
            return False
        slot_bytes = read.shelf.slot_bytes
        deadline_s = started_s + self._limits.allowed_s(len(blocks) * slot_bytes)
        self._reading += 1
        read.shelf.hold(blocks)
        pieces = self._pieces(read, blocks)
        mine: dict[asyncio.Future[PieceResult], ReadPiece] = {}
        try:
            while True:
                # A few at a time, so that a long read leaves threads to others.
                while len(mine) < self._limits.read_threads and not read.is_over:
                    piece = next(pieces, None)
                    if piece is None:
                        break
                    mine[self._submit(read, piece)] = piece
                if not mine:
                    break
                done, _ = await asyncio.wait(
                    mine, timeout=max(0.0, deadline_s - self._clock()), return_when=asyncio.FIRST_COMPLETED
                )
                for future in done:
                    # Its own callback may not have run yet.
                    self._finish(read, mine.pop(future), future)
                if not done:
                    self._counters.failures += 1
                    self.breaker.failed(self._clock(), at_once=True)
                    self._log.warning("g3_read_hangs", blocks=len(blocks))
                    read.has_failed = True
                    break
        finally:
            read.target.abandon()
            read.is_over = True
            for piece in pieces:
                read.shelf.let_go(piece.blocks)
            self._reading -= 1
            self._counters.read_s += self._clock() - started_s
        if not read.has_failed:
            self.breaker.succeeded()
        return True

    def _submit(self, read: _Read, piece: ReadPiece) -> "asyncio.Future[PieceResult]":
        future = asyncio.wrap_future(self._threads.submit(piece.run))
        self._in_flight.add(future)
        future.add_done_callback(lambda done: self._finish(read, piece, done))
        return future

    def _finish(self, read: _Read, piece: ReadPiece, future: "asyncio.Future[PieceResult]") -> None:
        if future not in self._in_flight:
            return
        self._in_flight.discard(future)
        read.shelf.let_go(piece.blocks)
        error = future.exception()
        if error is not None:
            self._counters.failures += 1
            self._log.warning("g3_read_failed", error=repr(error))
            if not read.is_over:
                self.breaker.failed(self._clock())
            read.has_failed = read.is_over = True
            return
        result = future.result()
        self._counters.corrupt += len(result.corrupt)
        self._counters.failures += len(result.failed)
        for at in result.corrupt | result.failed:
            read.dropped.append(piece.blocks[at].key)
            read.shelf.remove(piece.blocks[at])
            if read.target.is_reading:
                read.is_over = True
        read.good.update(piece.first + at for at in result.good)
        self._counters.read_bytes += len(result.good) * read.shelf.spec.block_bytes
        if result.corrupt or result.failed:
            self._log.warning("g3_blocks_dropped", corrupt=len(result.corrupt), unreadable=len(result.failed))
        self._shelves.publish(read.shelf)

    def _pieces(self, read: _Read, blocks: Sequence[DiskBlock]) -> Iterator[ReadPiece]:
        """Neighbours on the disk together, as far as they fit into ``io_bytes``."""
        shelf, place = read.shelf, self._shelves.place
        longest = max(1, self._limits.io_bytes // shelf.slot_bytes)
        first = 0
        for at in range(1, len(blocks) + 1):
            before = blocks[at - 1]
            if (
                at < len(blocks)
                and at - first < longest
                and (blocks[at].segment, blocks[at].slot) == (before.segment, before.slot + 1)
            ):
                continue
            files = self._shelves.files(shelf)
            yield ReadPiece(place.calls, files, shelf.slot_bytes, blocks[first:at], first, read.target)
            first = at
