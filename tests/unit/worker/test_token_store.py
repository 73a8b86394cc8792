import pytest

from kvbus_blocks.keys import chain_keys
from kvbus_wire.packing import pack_tokens
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlocksCleared, BlocksRemoved, BlocksStored

DOMAIN = b"d" * 32
SIZE = 4


def _stored(tokens: list[int], domain: bytes = DOMAIN) -> BlocksStored:
    packed = pack_tokens(tokens)
    keys = chain_keys(domain, packed, SIZE)
    return BlocksStored(b"", tuple(keys), tuple(packed[i : i + 4 * SIZE] for i in range(0, len(keys) * 16, 16)))


def test_a_chain_is_resolved_to_its_tokens_and_keys() -> None:
    store = TokenStore(10, SIZE)
    event = _stored(list(range(12)))
    store.apply(event)
    prefix = store.resolve(event.keys[1], DOMAIN)
    assert prefix is not None
    assert prefix.tokens == pack_tokens(range(8))
    assert prefix.keys == list(event.keys[:2])


def test_a_chain_with_a_removed_or_cleared_block_cannot_be_resolved() -> None:
    store = TokenStore(10, SIZE)
    event = _stored(list(range(12)))
    store.apply(event)
    store.apply(BlocksRemoved((event.keys[2],)))
    assert store.resolve(event.keys[2], DOMAIN) is None
    assert store.resolve(event.keys[1], DOMAIN) is not None
    store.apply(BlocksCleared())
    assert store.resolve(event.keys[1], DOMAIN) is None
    assert len(store) == 0


def test_a_key_of_another_cache_domain_gives_no_tokens() -> None:
    store = TokenStore(10, SIZE)
    event = _stored(list(range(8)))
    store.apply(event)
    assert store.resolve(event.keys[1], b"e" * 32) is None


def test_the_store_is_bounded_by_the_blocks_of_the_engine() -> None:
    store = TokenStore(2, SIZE)
    store.apply(_stored(list(range(12))))
    assert len(store) == 2
    assert store.refused == 1
    store.check_integrity()


def test_links_are_a_copy_with_parents_first() -> None:
    store = TokenStore(10, SIZE)
    event = _stored(list(range(12)))
    store.apply(event)
    links = store.links()
    store.apply(BlocksCleared())
    assert list(links) == [(event.keys[0], b""), (event.keys[1], event.keys[0]), (event.keys[2], event.keys[1])]


def test_integrity_names_a_block_without_its_parent() -> None:
    store = TokenStore(10, SIZE)
    event = _stored(list(range(8)))
    store.apply(BlocksStored(event.keys[0], event.keys[1:], event.tokens[1:]))
    with pytest.raises(AssertionError, match="does not follow its parent"):
        store.check_integrity()
