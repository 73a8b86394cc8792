"""A piece of a read, as a thread carries it out: a few MiB from the disk into aligned memory, checked and copied while they are
still in the processor's cache."""

import errno
import threading
from collections.abc import Sequence

import msgspec
import xxhash

from kvbus_kvbm.adapters.disk.calls import DiskCalls
from kvbus_kvbm.adapters.disk.files import ShelfFiles
from kvbus_kvbm.adapters.disk.threads import Buffer, copy
from kvbus_kvbm.core.disk_blocks import DiskBlock


class PieceResult(msgspec.Struct):
    """Positions in the piece. ``failed``: the disk could not read them."""

    good: set[int] = msgspec.field(default_factory=set)
    corrupt: set[int] = msgspec.field(default_factory=set)
    failed: set[int] = msgspec.field(default_factory=set)


class Target:
    """Where a read goes. ``into`` None: it is only checked."""

    def __init__(self, into: Sequence[memoryview] | None) -> None:
        self._into = into
        self.is_reading = into is not None
        self._lock = threading.Lock()
        self._abandoned = False

    def abandon(self) -> None:
        """After it the caller's memory is not written. Waits for the copy of one block at most."""
        with self._lock:
            self._abandoned = True
            self._into = None

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned

    def put(self, position: int, data: memoryview) -> None:
        with self._lock:
            if self._into is not None:
                copy(self._into[position], data)


class ReadPiece:
    """Blocks that lie one after the other on the disk; ``first``: the position of the first in the whole read."""

    def __init__(
        self,
        calls: DiskCalls,
        files: ShelfFiles,
        slot_bytes: int,
        blocks: Sequence[DiskBlock],
        first: int,
        target: Target,
    ) -> None:
        self.blocks = blocks
        self.first = first
        self._calls = calls
        self._files = files
        self._slot_bytes = slot_bytes
        self._target = target

    def run(self, buffer: Buffer) -> PieceResult:
        """Raise OSError: nothing of it could be read."""
        result = PieceResult()
        if self._target.is_abandoned:
            return result
        memory = buffer.view(len(self.blocks) * self._slot_bytes)
        try:
            size = self._read(memory, 0)
        except OSError as error:
            if error.errno != errno.EIO or len(self.blocks) == 1:
                raise
            self._read_one_by_one(memory, result)
        else:
            for at in range(len(self.blocks)):
                self._check(at, memory, size, result)
        return result

    def _read_one_by_one(self, memory: memoryview, result: PieceResult) -> None:
        """One bad place of the disk must not cost its neighbours."""
        for at in range(len(self.blocks)):
            start, end = at * self._slot_bytes, (at + 1) * self._slot_bytes
            try:
                size = start + self._read(memory[start:end], at)
            except OSError:
                result.failed.add(at)
                continue
            self._check(at, memory, size, result)
        if not result.good and not result.corrupt:
            raise OSError(errno.EIO, "no block could be read")

    def _read(self, memory: memoryview, first: int) -> int:
        """Bytes that are there; fewer than asked for where the file is cut."""
        at = (self.blocks[0].slot + first) * self._slot_bytes
        fd = self._files.fd(self.blocks[0].segment)
        done = 0
        while done < len(memory):
            size = self._calls.read(fd, [memory[done:]], at + done)
            done += size
            if size <= 0 or size % 4096:
                break
        return done

    def _check(self, at: int, memory: memoryview, size: int, result: PieceResult) -> None:
        start = at * self._slot_bytes
        end = start + self._files.spec.block_bytes
        data = memory[start:end]
        if end > size or xxhash.xxh3_64_intdigest(data) != self.blocks[at].checksum:
            result.corrupt.add(at)
            return
        self._target.put(self.first + at, data)
        result.good.add(at)
