"""Blocks are copied, and the copies are checked."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_transfer import checksum, copy_verified, verified
from kvbus_transfer.verified import Block, copy_and_checksum


def blocks_of(*sizes: int) -> list[Block]:
    sources = [memoryview(bytearray(os.urandom(size))) for size in sizes]
    return [(source, memoryview(bytearray(len(source))), checksum(source)) for source in sources]


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_copy_is_checked_by_what_was_copied(size: int) -> None:
    ((source, into, expected),) = blocks_of(size)
    assert copy_and_checksum(source, into) == expected
    assert into == source


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 9), wrong=st.sets(st.integers(0, 8)), large=st.booleans())
def test_it_says_how_many_leading_blocks_arrived_whole(count: int, wrong: set[int], large: bool) -> None:
    blocks = blocks_of(*[(2 << 20) if large else 5000] * count)
    for at in wrong:
        if at < count:
            blocks[at][0][at] ^= 1
    good = min([at for at in wrong if at < count], default=count)
    assert copy_verified(blocks) == good
    assert all(into == source for source, into, _ in blocks[:good])


def test_who_finds_the_other_thread_busy_does_all_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(ThreadPoolExecutor):
        """Takes work, and does not begin with it."""

        def _adjust_thread_count(self) -> None:
            pass

    monkeypatch.setattr(verified, "_other_thread", lambda: Busy(1))
    blocks = blocks_of(*[1 << 20] * 6)
    assert copy_verified(blocks) == 6
    assert all(into == source for source, into, _ in blocks)
    blocks[4][0][0] ^= 1
    assert copy_verified(blocks) == 4
    blocks[1][0][0] ^= 1
    assert copy_verified(blocks) == 1


def test_a_mapped_read_only_source_is_no_matter() -> None:
    data = os.urandom(6 << 20)
    source, into = memoryview(data), memoryview(bytearray(len(data)))
    assert copy_verified([(source, into, checksum(source))]) == 1
    assert bytes(into) == data
