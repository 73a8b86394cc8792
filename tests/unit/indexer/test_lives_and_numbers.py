"""Content is of one life of an instance, and as of one number of its events."""

import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import FeedKey, Order
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, chain, chunk, decision, stored
from kvbus_testkit.instances import block_keys
from kvbus_wire.kv_events import Cleared, KvEvents, Removed
from kvbus_wire.packing import short_keys

G1 = FeedKey(MODEL, "g1")


@pytest.fixture
def catalog() -> Catalog:
    """Two workers hold blocks 1 and 2, by events 1 and 2."""
    catalog = Catalog(Limits(), PlainIndex)
    for worker in ("w1", "w2"):
        catalog.joined(a_worker(worker), 0.0)
        catalog.apply(batch(stored(1), stored(2, parent=1), seq=1, worker=worker), 0.0)
    return catalog


@pytest.fixture
def live(catalog: Catalog) -> Catalog:
    catalog.stream_caught_up(0.0)
    return catalog


def depths(catalog: Catalog, *numbers: int, model: str = MODEL) -> dict[str, int]:
    """By name, tier, and whether it is only predicted."""
    catalog.check_integrity()
    found = catalog.match(model, short_keys(block_keys(*numbers)), 0.0)
    return {f"{m.instance_id}/{m.tier}{'?' * m.predicted}": m.depth for m in found}


def applied(catalog: Catalog) -> int:
    instance = catalog.instance("w1")
    assert instance is not None
    return instance.applied[G1]


def start(catalog: Catalog, now: float = 0.0) -> Order:
    (order,) = catalog.repairs.due(now)
    return order


# -- lives


@pytest.mark.parametrize("caught_up", [False, True])
def test_from_the_moment_a_worker_has_restarted_nothing_of_its_former_life_is_named(
    catalog: Catalog, caught_up: bool
) -> None:
    if caught_up:
        catalog.stream_caught_up(0.0)
    catalog.decided(decision("r1", 1, 2, 3), 0.0)
    assert depths(catalog, 1, 2, 3) == {"w1/g1?": 3, "w1/g1": 2, "w2/g1": 2}
    catalog.joined(a_worker("w1", incarnation=2), 0.0)
    assert depths(catalog, 1, 2, 3) == {"w2/g1": 2}
    assert (catalog.content.entries, len(catalog.predictions)) == (2, 0)


def test_a_worker_that_restarts_with_another_model_holds_nothing_of_the_former_one(live: Catalog) -> None:
    live.joined(a_worker("w1", incarnation=2, model="other"), 0.0)
    order = start(live)
    live.repairs.chunk(order, chunk(1, chain(1), incarnation=2, model="other"), 0.0)
    assert live.repairs.finish(order, 0.0)
    assert depths(live, 1, 2) == {"w2/g1": 2}
    assert depths(live, 1, 2, model="other") == {"w1/g1": 1}


def test_a_kvbm_that_restarts_holds_nothing_in_a_tier_that_it_has_not_used_since(live: Catalog) -> None:
    live.joined(a_kvbm(), 0.0)
    order = start(live)
    live.repairs.chunk(order, chunk(1, chain(1), worker="k1", tier="g2"), 0.0)
    live.repairs.chunk(order, chunk(1, chain(1, 2), worker="k1", tier="g3"), 0.0)
    live.repairs.finish(order, 0.0)
    assert depths(live, 1, 2) == {"w1/g1": 2, "w2/g1": 2, "k1/g2": 1, "k1/g3": 2}
    live.joined(a_kvbm(incarnation=2), 1.0)
    again = start(live, 1.0)
    live.repairs.chunk(again, chunk(1, chain(1), worker="k1", tier="g2", incarnation=2), 1.0)
    assert live.repairs.finish(again, 1.0)
    assert depths(live, 1, 2) == {"w1/g1": 2, "w2/g1": 2, "k1/g2": 1}


def test_who_left_and_comes_back_holds_nothing_until_it_has_told(live: Catalog) -> None:
    live.decided(decision("r1", 1, 2, 3), 0.0)
    live.left("w1")
    assert depths(live, 1, 2, 3) == {"w2/g1": 2}
    live.joined(a_worker("w1"), 0.0)
    assert depths(live, 1, 2, 3) == {"w2/g1": 2}
    order = start(live)
    live.repairs.chunk(order, chunk(2, chain(1)), 0.0)
    assert live.repairs.finish(order, 0.0)
    assert depths(live, 1, 2, 3) == {"w1/g1": 1, "w2/g1": 2}


# -- numbers


@pytest.mark.parametrize(
    "again",
    [
        batch(stored(1), seq=1),
        batch(stored(2, parent=1), seq=2),
        batch(stored(1), stored(2, parent=1), seq=1),
        batch(stored(2, parent=1), Removed(block_keys(2)), seq=2),
    ],
    ids=["the first", "the second", "both", "the last ones"],
)
def test_a_message_that_comes_again_brings_nothing_back_and_leaves_no_gap_behind_it(
    live: Catalog, again: KvEvents
) -> None:
    live.apply(batch(Removed(block_keys(2)), seq=3), 0.0)
    live.apply(again, 0.0)
    assert applied(live) == 3
    assert depths(live, 1, 2) == {"w1/g1": 1, "w2/g1": 2}
    live.apply(batch(stored(2, parent=1), stored(3, parent=2), seq=4), 0.0)
    assert applied(live) == 5
    assert depths(live, 1, 2, 3) == {"w1/g1": 3, "w2/g1": 2}
    assert not live.repairs.due(100.0)


def test_behind_a_gap_nothing_applies_until_it_is_filled(live: Catalog) -> None:
    live.apply(batch(stored(3, parent=2), stored(9), seq=4), 0.0)
    live.apply(batch(Cleared(), stored(8), seq=6), 0.0)
    assert applied(live) == 2
    assert depths(live, 1, 2, 3) == {"w1/g1": 2, "w2/g1": 2}
    assert depths(live, 8) == depths(live, 9) == {}
    order = start(live)
    for message in (
        batch(Removed(block_keys(1)), seq=3),
        batch(stored(3, parent=2), stored(9), seq=4),
    ):
        live.repairs.replay(order, message, 1, 0.0)
    assert depths(live, 9) == {"w1/g1": 1}
    assert live.repairs.finish(order, 0.0)
    assert applied(live) == 7
    assert depths(live, 1, 2, 3) == {"w2/g1": 2}
    assert depths(live, 8) == {"w1/g1": 1}


def test_what_was_purged_before_the_very_first_message_was_read_is_missing_too(live: Catalog) -> None:
    """The stream was empty when its end was reached; the kvbm's last event came and went unread."""
    live.joined(a_kvbm(), 0.0)
    order = start(live)
    live.repairs.chunk(order, chunk(1, chain(1), worker="k1", tier="g2"), 0.0)
    live.repairs.finish(order, 0.0)
    live.delivered(2, 1.0)
    live.apply(batch(stored(7), seq=3), 1.0, 2)
    again = start(live, 1.0)
    assert (again.instance_id, again.reason, again.replay) == ("k1", "stream_hole", None)


def test_at_the_start_of_a_stream_whose_first_messages_have_expired_nobody_is_asked_twice(catalog: Catalog) -> None:
    catalog.joined(a_kvbm(), 0.0)
    catalog.delivered(40, 0.0)
    catalog.apply(batch(Removed(block_keys(2)), seq=3), 0.0, 40)
    assert depths(catalog, 1, 2) == {"w1/g1": 1, "w2/g1": 2}
    catalog.stream_caught_up(0.0)
    assert (start(catalog).instance_id, catalog.repairs.due(100.0)) == ("k1", [])


def test_a_gap_that_the_stream_fills_does_not_hide_the_feeds_of_which_it_holds_nothing(catalog: Catalog) -> None:
    """All that the kvbm said of g2 was in a stream that is gone; of g3 two messages are in the wrong order."""
    catalog.joined(a_kvbm(), 0.0)
    late, early = (batch(stored(number), seq=number, worker="k1", tier="g3") for number in (2, 1))
    for seq, message in ((1, late), (2, early)):
        catalog.delivered(seq, 0.0)
        catalog.apply(message, 0.0, seq)
    catalog.stream_caught_up(0.0)
    order = start(catalog)
    assert (order.instance_id, order.reason, order.replay) == ("k1", "unseen", None)
    catalog.repairs.chunk(order, chunk(3, chain(1, 2), worker="k1", tier="g2"), 0.0)
    catalog.repairs.chunk(order, chunk(2, chain(1), chain(2), worker="k1", tier="g3"), 0.0)
    assert catalog.repairs.finish(order, 0.0)
    assert depths(catalog, 1, 2) == {"w1/g1": 2, "w2/g1": 2, "k1/g2": 2, "k1/g3": 1}
