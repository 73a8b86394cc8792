import pytest

from kvbus_blocks.eviction import EvictionOrder


def _evict_all(order: EvictionOrder) -> list[bytes]:
    gone = []
    while (key := order.evict()) is not None:
        gone.append(key)
        order.check_integrity()
    return gone


def test_the_least_recently_used_goes_first() -> None:
    order = EvictionOrder()
    for key in (b"a", b"b", b"c"):
        order.insert(key)
    order.touch([b"a"])
    assert _evict_all(order) == [b"b", b"c", b"a"]
    assert order.evict() is None


def test_leaves_go_before_parents_even_when_used_later() -> None:
    order = EvictionOrder()
    order.insert(b"root")
    order.insert(b"child", b"root")
    order.insert(b"other")
    order.touch([b"child"])
    assert _evict_all(order) == [b"other", b"child", b"root"]


def test_a_pinned_block_keeps_itself_and_its_parents() -> None:
    order = EvictionOrder()
    order.insert(b"root")
    order.insert(b"child", b"root")
    order.pin(b"root")
    order.pin(b"child")
    order.pin(b"child")
    assert order.evictable == 0
    order.unpin(b"child")
    assert order.is_pinned(b"child")
    assert order.evict() is None
    order.unpin(b"child")
    assert order.evictable == 1
    assert _evict_all(order) == [b"child"]
    order.unpin(b"root")
    assert _evict_all(order) == [b"root"]


def test_a_child_stored_before_its_parent_still_goes_first() -> None:
    order = EvictionOrder()
    order.insert(b"child", b"root")
    order.insert(b"root")
    order.touch([b"child"])
    assert _evict_all(order) == [b"child", b"root"]


def test_a_discarded_block_is_unknown_and_may_come_back() -> None:
    order = EvictionOrder()
    order.insert(b"a")
    order.pin(b"a")
    assert order.discard(b"a")
    assert not order.discard(b"a")
    assert len(order) == 0
    assert order.evictable == 0
    order.insert(b"a")
    assert b"a" in order
    assert _evict_all(order) == [b"a"]


def test_mistakes_of_the_caller_are_errors() -> None:
    order = EvictionOrder()
    order.insert(b"a")
    with pytest.raises(KeyError):
        order.insert(b"a")
    with pytest.raises(KeyError):
        order.pin(b"b")
    with pytest.raises(ValueError, match="not pinned"):
        order.unpin(b"a")
    order.touch([b"unknown"])
    assert len(order) == 1


def test_touching_for_ever_does_not_pile_up_candidates() -> None:
    order = EvictionOrder()
    for key in (b"a", b"b"):
        order.insert(key)
    for _ in range(10_000):
        order.touch([b"a"])
    order.check_integrity()
    assert _evict_all(order) == [b"b", b"a"]
