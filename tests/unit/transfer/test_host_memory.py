"""Memory on huge pages, where there are some."""

import mmap
from pathlib import Path

import pytest

from kvbus_transfer import host_memory
from kvbus_transfer.copying import address_of
from kvbus_transfer.host_memory import ask_for_huge_pages


def test_it_is_zeroed_and_writable() -> None:
    memory = host_memory(3 << 20)
    assert memory.nbytes == 3 << 20
    assert not any(memory[:: 1 << 12])
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.parametrize("size", [1, 4096, (1 << 20) - 1, 1 << 20, (2 << 20) + 4096, 5 << 20])
def test_all_of_it_can_be_used(size: int) -> None:
    memory = host_memory(size)
    assert memory.nbytes == size
    memory[:] = b"\xff" * size
    assert address_of(memory) % mmap.PAGESIZE == 0
    assert size < 1 << 20 or address_of(memory) % (2 << 20) == 0


def test_the_kernel_was_asked_for_huge_pages() -> None:
    memory = host_memory(8 << 20)
    start, flags, inside = address_of(memory), "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= start < high
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags


def test_a_kernel_that_has_none_changes_nothing() -> None:
    class Old:
        def madvise(self, _: int) -> None:
            raise OSError(22, "Invalid argument")

    ask_for_huge_pages(Old())  # type: ignore[arg-type]
    with mmap.mmap(-1, 4096) as memory:
        ask_for_huge_pages(memory)


@pytest.mark.parametrize("size", [0, -1])
def test_there_is_no_memory_without_a_size(size: int) -> None:
    with pytest.raises(ValueError, match="bytes of memory"):
        host_memory(size)
