"""Memory of a process that other processes read, or that is read into."""

import contextlib
import mmap


def host_memory(size_bytes: int) -> memoryview:
    """Zeroed and writable; it lives as long as something refers to it.

    It lies on huge pages where the kernel gives them: UCX and NIXL pin what they copy from another process page by page, and took
    540 us for 2 MiB on pages of 4 KiB, 220 us on pages of 2 MiB. Raise OSError when there is no memory, ValueError without a size.
    """
    if size_bytes < 1:
        raise ValueError(f"{size_bytes} bytes of memory")
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(memory)
    return memoryview(memory)


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """A kernel without them says no, which changes nothing."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
