from kvbus_worker.engines.base import BlocksRemoved, BlocksStored
from kvbus_worker.engines.mock.block_cache import BlockCache

A, B, C, D = b"a", b"b", b"c", b"d"


def _publish_chain(cache: BlockCache, keys: list[bytes]) -> None:
    cache.allocate(len(keys))
    cache.publish(b"", keys, [key * 4 for key in keys])


def test_a_full_block_is_announced_with_its_parent_and_tokens() -> None:
    cache = BlockCache(4)
    _publish_chain(cache, [A, B])
    assert cache.take_events() == (BlocksStored(b"", (A, B), (A * 4, B * 4)),)
    assert cache.leading([A, B, C]) == 2


def test_the_end_of_the_oldest_chain_is_evicted_first() -> None:
    cache = BlockCache(4)
    _publish_chain(cache, [A, B])
    cache.release([A, B])
    _publish_chain(cache, [C, D])
    cache.release([C, D])
    cache.acquire([A, B])
    cache.release([A, B])
    cache.take_events()
    cache.allocate(1)
    assert cache.take_events() == (BlocksRemoved((D,)),)
    cache.allocate(2)
    assert cache.take_events() == (BlocksRemoved((C, B)),)
    cache.check_integrity()


def test_referenced_blocks_are_never_evicted() -> None:
    cache = BlockCache(2)
    _publish_chain(cache, [A, B])
    assert not cache.can_allocate(1)
    cache.release([A, B])
    assert cache.can_allocate(2)


def test_an_equal_block_of_another_sequence_is_shared() -> None:
    cache = BlockCache(3)
    _publish_chain(cache, [A])
    _publish_chain(cache, [A])
    assert cache.in_use == 1
    cache.release([A])
    assert cache.in_use == 1
    cache.release([A])
    assert (cache.in_use, cache.cached) == (0, 1)


def test_who_only_looks_at_a_chain_does_not_use_it() -> None:
    cache = BlockCache(4)
    for chain in ([A, B], [C, D]):
        _publish_chain(cache, chain)
        cache.release(chain)
    for _ in range(100):  # a request that waits for room, step by step
        assert cache.acquire([A, B]) == 2
        cache.let_go([A, B])
    cache.check_integrity()
    cache.take_events()
    cache.allocate(2)
    assert cache.take_events() == (BlocksRemoved((B, A)),)


def test_adopted_blocks_never_evict_their_own_chain() -> None:
    cache = BlockCache(3)
    _publish_chain(cache, [A, B])
    cache.release([A, B])
    assert cache.adopt(B, [C, D], [b"", b""]) == 1
    assert cache.leading([A, B, C, D]) == 3
    cache.check_integrity()


def test_nothing_is_adopted_below_a_missing_parent() -> None:
    cache = BlockCache(3)
    assert cache.adopt(A, [B], [b""]) == 0
    assert cache.cached == 0


def test_blocks_that_another_sequence_was_faster_with_are_used_and_the_rest_is_its_own() -> None:
    cache = BlockCache(6)
    _publish_chain(cache, [A, B])
    cache.take_events()
    _publish_chain(cache, [A, B, C, D])
    assert cache.take_events() == (BlocksStored(B, (C, D), (C * 4, D * 4)),)
    assert (cache.in_use, cache.cached) == (4, 4)
    cache.release([A, B, C, D])
    assert (cache.in_use, cache.cached) == (2, 4)
    cache.check_integrity()


def test_the_users_of_a_beginning_only_do_not_hold_what_follows_it() -> None:
    cache = BlockCache(4)
    _publish_chain(cache, [A, B, C, D])
    cache.release([A, B, C, D])
    assert cache.acquire([A, b"x"]) == 1
    assert (cache.in_use, cache.available) == (1, 3)
    cache.allocate(3)
    assert cache.leading([A, B, C, D]) == 1
    cache.check_integrity()


def test_a_chain_is_told_from_its_end() -> None:
    cache = BlockCache(4)
    _publish_chain(cache, [A, B, C])
    cache.release([A, B, C])
    assert cache.acquire([A]) == 1
    assert cache.chain(B) == [A, B]
    assert cache.chain(C) == [A, B, C]
