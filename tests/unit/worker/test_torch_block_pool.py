"""Block bookkeeping of the torch engine."""

import pytest

from kvbus_blocks.keys import ROOT
from kvbus_worker.engines.base import BlocksCleared, BlocksRemoved, BlocksStored
from kvbus_worker.engines.torch.block_pool import BlockPool


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def store(pool: BlockPool, names: str, parent: bytes = ROOT) -> list[int]:
    """One held block per letter, chained below ``parent``."""
    blocks = pool.allocate(len(names))
    for i, name in enumerate(names):
        blocks[i] = pool.register(blocks[i], key(name), parent, name.encode())
        parent = key(name)
    pool.check_integrity()
    return blocks


def test_released_blocks_stay_cached_until_their_room_is_needed() -> None:
    pool = BlockPool(4)
    pool.release(store(pool, "abc"))
    assert (pool.available, pool.used) == (4, 0)
    assert pool.lookup([key("a"), key("b"), key("c"), key("d")]) == [0, 1, 2]
    pool.allocate(2)
    pool.check_integrity()
    assert pool.lookup([key("a"), key("b"), key("c")]) == [0, 1]


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pool = BlockPool(4)
    pool.release(store(pool, "ab"))
    pool.release(store(pool, "cd"))
    pool.acquire(pool.lookup([key("a"), key("b")]))
    pool.release(pool.lookup([key("a"), key("b")]))  # the older chain was used again
    pool.take_events()
    pool.allocate(3)
    pool.check_integrity()
    assert pool.take_events() == (BlocksRemoved((key("d"), key("c"), key("b"))),)
    assert pool.contains(key("a"))


def test_a_held_block_keeps_its_ancestors() -> None:
    pool = BlockPool(5)
    held = store(pool, "abc")
    pool.release(store(pool, "xy"))
    pool.allocate(2)
    pool.check_integrity()
    assert [pool.contains(key(name)) for name in "abcxy"] == [True, True, True, False, False]
    with pytest.raises(ValueError, match="0 available"):
        pool.allocate(1)
    pool.release(held)
    assert pool.available == 3


def test_an_equal_block_is_shared_and_the_copy_becomes_free() -> None:
    pool = BlockPool(4)
    first = store(pool, "ab")
    copy = pool.allocate(1)[0]
    assert pool.register(copy, key("a"), ROOT, b"a") == first[0]
    assert pool.available == 2
    pool.release(first)
    pool.check_integrity()
    assert pool.available == 3  # `a` is still held by the second user
    pool.release([first[0]])
    assert pool.available == 4


def test_neighbours_are_preferred_so_that_a_sequence_lies_in_one_piece() -> None:
    pool = BlockPool(8)
    first = pool.allocate(2)
    other = pool.allocate(1)
    assert pool.allocate(2, after=other[-1]) == [3, 4]
    pool.release(other)
    assert pool.allocate(1, after=first[-1]) == [2]


def test_events_tell_chains_in_as_few_pieces_as_possible() -> None:
    pool = BlockPool(4)
    held = store(pool, "ab")
    held += store(pool, "c", parent=key("b"))
    held += store(pool, "x")
    assert pool.take_events() == (
        BlocksStored(ROOT, (key("a"), key("b"), key("c")), (b"a", b"b", b"c")),
        BlocksStored(ROOT, (key("x"),), (b"x",)),
    )
    assert pool.take_events() == ()
    pool.release(held)
    pool.clear()
    assert pool.take_events() == (BlocksCleared(),)
    assert pool.available == 4
    pool.clear()
    assert pool.take_events() == ()


def test_a_chain_is_held_from_its_root() -> None:
    pool = BlockPool(4)
    blocks = store(pool, "abc")
    pool.release(blocks)
    assert pool.acquire_chain(key("c")) == blocks
    pool.check_integrity()
    assert pool.available == 1
    with pytest.raises(KeyError):
        pool.acquire_chain(key("z"))
