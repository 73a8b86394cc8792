"""Memory of a process that other processes read, or that is read into."""

import contextlib
import mmap

from kvbus_transfer.copying import address_of

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_HUGE_PAGE_BYTES = 2 << 20
_WORTH_BYTES = 1 << 20


def host_memory(size_bytes: int) -> memoryview:
    """Zeroed and writable; it lives as long as something refers to it.

    From 1 MiB on it lies on huge pages where the kernel gives them. UCX and NIXL pin what they copy from another process page by
    page, and took 540 us for 2 MiB on pages of 4 KiB, 220 us on pages of 2 MiB; a disk that is given scattered pages reads 1.3
    GB/s, and 3.7 into huge ones. Raise OSError when there is no memory, ValueError without a size.
    """
    if size_bytes < 1:
        raise ValueError(f"{size_bytes} bytes of memory")
    if size_bytes < _WORTH_BYTES:
        return memoryview(mmap.mmap(-1, size_bytes, flags=_FLAGS))
    # One page more than is used: where the mapping begins is up to the kernel, and huge pages begin at their multiples.
    whole = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole + _HUGE_PAGE_BYTES, flags=_FLAGS)
    ask_for_huge_pages(memory)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + size_bytes]


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """A kernel without them says no, which changes nothing."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
