"""G3: blocks in files on a disk of this host. All that is known of them is changed on the event loop only; threads read, write and
append to journals, and may hang there for ever without anybody else waiting for them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.disk.calls import DiskCalls, SystemCalls
from kvbus_kvbm.adapters.disk.place import Place
from kvbus_kvbm.adapters.disk.reads import Reads
from kvbus_kvbm.adapters.disk.shelves import Shelves
from kvbus_kvbm.adapters.disk.writes import Writes
from kvbus_kvbm.core.disk_space import DiskLimits
from kvbus_kvbm.core.lower import BlockMeta, Changed, TierCounters, TierUsage
from kvbus_kvbm.core.pools import PoolSpec


class DiskTier:
    """A `LowerTier`. ``clock``: that of the directives' times; ``unix_clock``: what they are written in."""

    name = "g3"

    def __init__(
        self,
        directory: Path,
        limits: DiskLimits,
        *,
        changed: Changed,
        log: Any,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        calls: DiskCalls | None = None,
    ) -> None:
        self.counters = TierCounters()
        self._limits = limits
        self._log = log
        self._clock = clock
        self._place = Place(calls or SystemCalls(), directory, limits)
        self._shelves = Shelves(self._place, limits, changed, self.counters, unix_s=unix_clock() - clock())
        self._reads = Reads(self._shelves, limits, self.counters, clock, log)
        self._writes = Writes(self._shelves, limits, self.counters, clock, log)
        self._is_open = False
        self._is_closed = False
        self._late_start: asyncio.Future[dict[str, int]] | None = None

    def usage(self) -> TierUsage:
        return TierUsage(
            blocks=sum(len(shelf) for shelf in self._shelves),
            used_bytes=sum(len(shelf) * shelf.slot_bytes for shelf in self._shelves),
            capacity_bytes=self._limits.capacity_bytes,
            available=self._is_open and self._reads.breaker.is_closed and self._writes.breaker.is_closed,
        )

    @property
    def specs(self) -> list[PoolSpec]:
        """What there are blocks of."""
        return [shelf.spec for shelf in self._shelves if len(shelf)]

    async def start(self) -> None:
        """A disk that does not answer in time delays nobody: the tier opens as soon as it does."""
        recovery = self._writes.call(lambda _: self._shelves.recover(self._clock()))
        await asyncio.wait((recovery,), timeout=self._limits.start_s)
        if recovery.done():
            self._open(recovery.result())
        else:
            self._log.warning("g3_start_hangs", after_s=self._limits.start_s)
            self._late_start = recovery
            recovery.add_done_callback(self._open_late)

    def _open(self, found: dict[str, int]) -> None:
        self._is_open = True
        for shelf in self._shelves:
            self._shelves.publish(shelf)
        self._log.info("g3_recovered", **found, direct=bool(self._place.direct))

    def _open_late(self, recovery: "asyncio.Future[dict[str, int]]") -> None:
        if recovery.cancelled() or self._is_closed:
            return
        error = recovery.exception()
        if error is None:
            self._open(recovery.result())
        else:
            self._log.error("g3_refused", error=str(error))

    async def close(self) -> None:
        if self._is_closed or not self._is_open:
            self._is_closed = True
            if self._late_start is not None:
                self._late_start.cancel()
            return
        self._is_closed, self._is_open = True, False
        is_quiet = await self._reads.settle()
        if not (await self._writes.settle() and is_quiet):
            # What still hangs in a thread may yet write: the next kvbm must not have the directory before we are gone.
            self._log.warning("g3_closed_in_trouble")
            return
        await self._writes.call(lambda _: self._shelves.close())
        self._reads.stop()
        self._writes.stop()

    def find(self, spec: PoolSpec, key: bytes) -> BlockMeta | None:
        shelf = self._shelves.find(spec)
        block = None if shelf is None else shelf.find(key)
        return block.meta if block is not None and block.present else None

    async def leading(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        shelf = self._shelves.find(spec)
        if shelf is None or not self._is_open or not self._reads.breaker.can_pass(self._clock()):
            return 0
        return len(shelf.run(keys))

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        if not self._is_open or not blocks:
            self.counters.refused += len(blocks)
            return [False] * len(blocks)
        return await self._writes.write(spec, blocks, data)

    async def read(self, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        shelf = self._shelves.find(spec)
        if shelf is None or not self._is_open:
            self.counters.misses += len(keys)
            return []
        shelf.in_use = True
        found = await self._reads.read(shelf, keys, into)
        self._writes.flush_soon(shelf)  # what did not hold
        return found

    async def retain(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> list[int]:
        shelf = self._shelves.find(spec)
        if shelf is None or not self._is_open:
            return []
        unpinned = self._shelves.retain(shelf, keys, directives, self._clock())
        self._writes.flush_soon(shelf)
        return unpinned

    async def drop(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        shelf = self._shelves.find(spec)
        if shelf is None or not self._is_open:
            return 0
        dropped = 0
        found = [block for block in map(shelf.find, dict.fromkeys(keys)) if block is not None]
        for block in sorted(found, key=lambda block: -block.depth):
            if block.kept and not block.children:
                shelf.remove(block)
                dropped += 1
        self._shelves.publish(shelf)
        await self._writes.flush(shelf)
        return dropped

    async def verify(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        shelf = self._shelves.find(spec)
        if shelf is None or not self._is_open:
            return []
        dropped = await self._reads.verify(shelf, keys)
        self._writes.flush_soon(shelf)
        return dropped

    def check_integrity(self) -> None:
        """For tests."""
        for shelf in self._shelves:
            shelf.check_integrity()
