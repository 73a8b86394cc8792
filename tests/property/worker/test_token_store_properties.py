"""The token store against a naive model, fed with the events of a real block cache; snapshots of it read in any chunks."""

import hypothesis.strategies as st
from hypothesis import given, settings

from kvbus_blocks.keys import chain_keys
from kvbus_wire.packing import pack_tokens, unpack_keys
from kvbus_wire.worker import BlockSnapshot
from kvbus_worker.core.snapshots import Snapshots
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.mock.block_cache import BlockCache

DOMAIN = b"d" * 32
BLOCK = 2
prompts = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), max_size=30)


@settings(deadline=None)
@given(prompts, st.integers(4, 12), st.integers(1, 5))
def test_the_store_follows_the_cache_and_its_snapshot_is_complete(
    script: list[list[int]], capacity: int, chunk: int
) -> None:
    cache, store = BlockCache(capacity), TokenStore(capacity, BLOCK)
    known: dict[bytes, bytes] = {}
    for prompt in script:
        packed = pack_tokens(prompt)
        keys = chain_keys(DOMAIN, packed, BLOCK)[:capacity]
        known |= {key: packed[: 4 * BLOCK * (i + 1)] for i, key in enumerate(keys)}
        held = cache.acquire(keys)
        for i in range(held, len(keys)):
            if not cache.can_allocate(1):
                break
            cache.allocate(1)
            cache.publish(keys[i - 1] if i else b"", [keys[i]], [packed[4 * BLOCK * i : 4 * BLOCK * (i + 1)]])
            held = i + 1
        cache.release(keys[:held])
        for event in cache.take_events():
            store.apply(event)
        store.check_integrity()
        cache.check_integrity()
        for key, tokens in known.items():
            prefix = store.resolve(key, DOMAIN)
            assert (prefix is not None) == (key in cache)
            assert prefix is None or prefix.tokens == tokens
    assert store.refused == 0

    snapshots = Snapshots(limit=1, ttl_s=1.0, chunk_blocks=chunk)
    seen: list[bytes] = []
    cursor: int | None = 0
    snapshot_id = ""
    while cursor is not None:
        part = snapshots.answer(BlockSnapshot(cursor=cursor, snapshot_id=snapshot_id), lambda: (store.links(), 1), 0.0)
        snapshot_id, cursor = part.snapshot_id, part.next_cursor
        for chain in part.chains:
            assert chain.parent == b"" or chain.parent in seen
            seen += unpack_keys(chain.keys)
    assert sorted(seen) == sorted(key for key in known if key in cache)
