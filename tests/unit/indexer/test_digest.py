"""Equal for equal content, and for no other."""

import msgspec
import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.digest import combined, feed_digests
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, stored
from kvbus_wire.indexer import FeedDigest
from kvbus_wire.kv_events import KvEvents

FEED = FeedDigest(instance_id="w1", incarnation=1, model=MODEL, tier="g1", kv_seq=2, entries=2, key_sum=3)
OTHER = FeedDigest(instance_id="w2", incarnation=2, model=MODEL, tier="g1", kv_seq=5, entries=1, key_sum=1)


def a_catalog(*messages: KvEvents) -> Catalog:
    catalog = Catalog(Limits(), PlainIndex)
    catalog.joined(a_worker("w1"), 0.0)
    catalog.joined(a_worker("w2"), 0.0)
    catalog.joined(a_kvbm("k1"), 0.0)
    for message in messages:
        catalog.apply(message, 0.0)
    return catalog


def digest(catalog: Catalog) -> str:
    return combined(feed_digests(catalog))


@pytest.mark.parametrize(
    ("field", "value"),
    [("instance_id", "w3"), ("incarnation", 7), ("model", "m"), ("tier", "g2"), ("entries", 3), ("key_sum", 4)],
)
def test_whose_blocks_they_are_counts_as_much_as_which(field: str, value: object) -> None:
    changed = msgspec.structs.replace(FEED, **{field: value})
    assert combined([changed, OTHER]) != combined([FEED, OTHER])


def test_neither_the_order_of_the_feeds_nor_how_many_events_they_took_matters() -> None:
    assert combined([OTHER, msgspec.structs.replace(FEED, kv_seq=9)]) == combined([FEED, OTHER])


def test_the_same_blocks_at_other_owners_are_another_content() -> None:
    """A block at one of two workers, at the other, at both, or in one of two tiers of a kvbm."""
    first, second = batch(stored(5), seq=1, worker="w1"), batch(stored(5), seq=1, worker="w2")
    catalogs = [
        a_catalog(first),
        a_catalog(second),
        a_catalog(first, second),
        a_catalog(batch(stored(5), seq=1, worker="k1", tier="g2")),
        a_catalog(batch(stored(5), seq=1, worker="k1", tier="g3")),
    ]
    assert len(set(map(digest, catalogs))) == len(catalogs)
    assert digest(a_catalog(second, first)) == digest(a_catalog(first, second))


def test_every_feed_that_holds_something_is_told_with_its_owner() -> None:
    catalog = a_catalog(
        batch(stored(5, 6), seq=1, worker="w2"),
        batch(stored(5), seq=1, worker="k1", tier="g3"),
        batch(stored(), seq=1, worker="w1"),
    )
    assert {(f.instance_id, f.incarnation, f.model, f.tier, f.entries, f.key_sum) for f in feed_digests(catalog)} == {
        ("w2", 1, MODEL, "g1", 2, 11),
        ("k1", 1, MODEL, "g3", 1, 5),
    }
