"""Memory that kernels work on: zero, at a fixed address, and real only where it has been written to."""

import ctypes
import mmap
from contextlib import suppress

# Reserved, not promised: `mmap.MAP_NORESERVE` has no name before Python 3.13.
_NO_RESERVE = 0x4000
_HUGE_PAGE = 2 << 20


class Memory:
    """Lives as long as somebody holds it. Raise MemoryError when the system refuses to reserve so much."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(size_bytes, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, self.size_bytes, flags=flags)
        except OSError as problem:
            raise MemoryError(f"cannot reserve {self.size_bytes} bytes: {problem}") from problem
        self._start = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)

    def words64(self) -> "memoryview[int]":
        return memoryview(self._map).cast("q")

    def words32(self) -> "memoryview[int]":
        return memoryview(self._map).cast("i")

    def settle(self, used_bytes: int) -> None:
        """So much is in use and will stay so: the kernel may join its pages to huge ones, in which scattered look-ups are faster.

        Not from the start: making a huge page at the first touch can take milliseconds, and a new table is touched all over.
        """
        whole = min(used_bytes, self.size_bytes) // _HUGE_PAGE * _HUGE_PAGE
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, 0, whole)

    def give_back(self, used_bytes: int) -> None:
        """What lies behind is not needed, and zero afterwards."""
        start = -(-used_bytes // _HUGE_PAGE) * _HUGE_PAGE
        if start < self.size_bytes:
            self._map.madvise(mmap.MADV_DONTNEED, start, self.size_bytes - start)
