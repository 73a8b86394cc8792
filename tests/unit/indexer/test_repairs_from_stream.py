"""A gap is first filled from the stream; only what that has lost costs a snapshot."""

import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import FeedKey, Order, Phase, Replay
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, chain, chunk, load_report, stored
from kvbus_testkit.instances import block_keys
from kvbus_wire.kv_events import Cleared, KvEvents, Removed
from kvbus_wire.packing import short_keys

G1 = FeedKey(MODEL, "g1")


@pytest.fixture
def catalog() -> Catalog:
    """It follows one worker, whose first event was message 10 of the stream."""
    catalog = Catalog(Limits(), PlainIndex)
    catalog.joined(a_worker(), 0.0)
    deliver(catalog, 10, batch(Cleared(), seq=1))
    catalog.stream_caught_up(0.0)
    return catalog


def deliver(catalog: Catalog, stream_seq: int, message: KvEvents) -> None:
    catalog.delivered(stream_seq, 0.0)
    catalog.apply(message, 0.0, stream_seq)


def start(catalog: Catalog, now: float = 0.0) -> Order:
    (order,) = catalog.repairs.due(now)
    return order


def depth(catalog: Catalog, *numbers: int) -> int:
    catalog.check_integrity()
    return max((match.depth for match in catalog.match(MODEL, short_keys(block_keys(*numbers)), 0.0)), default=0)


def test_events_that_came_in_the_wrong_order_are_read_again_in_the_right_one(catalog: Catalog) -> None:
    late, early = batch(stored(2, parent=1), seq=3), batch(stored(1), seq=2)
    deliver(catalog, 11, late)
    order = start(catalog)
    assert (order.reason, order.replay) == ("gap", Replay(G1, after=10))
    assert catalog.repairs.replay(order, early, 12, 0.0)
    assert catalog.repairs.replay(order, late, 11, 0.0)
    assert catalog.repairs.finish(order, 0.0)
    assert depth(catalog, 1, 2) == 2
    deliver(catalog, 12, early)
    assert depth(catalog, 1, 2) == 2
    assert not catalog.repairs.due(100.0)


def test_the_next_gap_is_looked_for_behind_what_was_read(catalog: Catalog) -> None:
    deliver(catalog, 11, batch(stored(1), seq=3))
    order = start(catalog)
    for seq, message in ((12, batch(stored(5), seq=2)), (11, batch(stored(1), seq=3))):
        catalog.repairs.replay(order, message, seq, 0.0)
    catalog.repairs.finish(order, 0.0)
    deliver(catalog, 13, batch(stored(7), seq=9))
    assert start(catalog).replay == Replay(G1, after=12)


def test_what_arrives_while_the_stream_is_read_again_applies_on_top(catalog: Catalog) -> None:
    deliver(catalog, 12, batch(stored(2, parent=1), seq=3))
    order = start(catalog)
    deliver(catalog, 13, batch(stored(3, parent=2), Removed(block_keys(2)), seq=4))
    catalog.repairs.replay(order, batch(stored(1), seq=2), 11, 0.0)
    catalog.repairs.replay(order, batch(stored(2, parent=1), seq=3), 12, 0.0)
    assert catalog.repairs.finish(order, 0.0)
    assert depth(catalog, 1, 2, 3) == 1


def test_what_the_stream_has_lost_costs_a_snapshot_at_once(catalog: Catalog) -> None:
    deliver(catalog, 12, batch(stored(2, parent=1), seq=4))
    order = start(catalog)
    catalog.repairs.replay(order, batch(stored(2, parent=1), seq=4), 12, 0.0)
    assert not catalog.repairs.finish(order, 0.0)
    snapshot = start(catalog)
    assert (snapshot.reason, snapshot.replay) == ("gap", None)
    assert catalog.repairs.chunk(snapshot, chunk(4, chain(1, 2)), 0.0)
    assert catalog.repairs.finish(snapshot, 0.0)
    assert depth(catalog, 1, 2) == 2


def test_a_stream_that_cannot_be_read_costs_a_snapshot_and_no_backoff(catalog: Catalog) -> None:
    deliver(catalog, 12, batch(stored(2), seq=4))
    catalog.repairs.fail(start(catalog), 0.0)
    assert start(catalog).replay is None


def test_behind_a_snapshot_the_stream_is_read_from_where_it_stood_when_the_snapshot_was_asked_for(
    catalog: Catalog,
) -> None:
    deliver(catalog, 12, batch(stored(2), seq=4))
    catalog.repairs.finish(start(catalog), 0.0)
    snapshot = start(catalog)
    deliver(catalog, 13, batch(stored(8), seq=7))
    catalog.repairs.chunk(snapshot, chunk(5, chain(2)), 0.0)
    catalog.repairs.finish(snapshot, 0.0)
    assert start(catalog, 1.0).replay == Replay(G1, after=12)


def test_a_replay_takes_nothing_of_another_feed_or_an_earlier_life(catalog: Catalog) -> None:
    catalog.joined(a_worker(incarnation=2), 0.0)
    snapshot = start(catalog)
    catalog.repairs.chunk(snapshot, chunk(0, incarnation=2), 0.0)
    catalog.repairs.finish(snapshot, 0.0)
    deliver(catalog, 15, batch(stored(2, parent=1), seq=2, incarnation=2))
    order = start(catalog)
    for seq, message in (
        (11, batch(stored(1), stored(2, parent=1), seq=1)),
        (12, batch(stored(1), seq=1, incarnation=2, tier="g2")),
        (13, batch(stored(1), seq=1, incarnation=2, model="other")),
    ):
        assert catalog.repairs.replay(order, message, seq, 0.0)
    assert not catalog.repairs.finish(order, 0.0)
    assert catalog.content.entries == 0


def test_what_another_feed_says_before_the_stream_is_read_again_is_not_lost(catalog: Catalog) -> None:
    """A replay brings back one feed only."""
    deliver(catalog, 12, batch(stored(2, parent=1), seq=3))
    deliver(catalog, 13, batch(stored(1), seq=1, tier="g2"))
    order = start(catalog)
    deliver(catalog, 14, batch(stored(2, parent=1), seq=2, tier="g2"))
    catalog.repairs.replay(order, batch(stored(1), seq=2), 11, 0.0)
    catalog.repairs.replay(order, batch(stored(2, parent=1), seq=3), 12, 0.0)
    assert catalog.repairs.finish(order, 0.0)
    catalog.check_integrity()
    found = catalog.match(MODEL, short_keys(block_keys(1, 2)), 0.0)
    assert {match.tier: match.depth for match in found} == {"g1": 2, "g2": 2}
    assert not catalog.repairs.due(100.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_more_events_than_can_be_kept_beside_a_replay_cost_a_snapshot(when: str) -> None:
    catalog = Catalog(Limits(max_buffered_keys=5), PlainIndex)
    catalog.joined(a_worker(), 0.0)
    deliver(catalog, 10, batch(Cleared(), seq=1))
    catalog.stream_caught_up(0.0)
    deliver(catalog, 11, batch(stored(1), seq=3))
    order = start(catalog) if when == "after" else None
    deliver(catalog, 12, batch(stored(2, 3, 4), seq=4))
    assert catalog.instance("w1").buffered_keys == 4  # type: ignore[union-attr]
    deliver(catalog, 13, batch(stored(5), seq=5))
    catalog.check_integrity()
    order = order or start(catalog)
    catalog.repairs.replay(order, batch(Cleared(), seq=2), 9, 0.0)
    catalog.repairs.replay(order, batch(stored(1), seq=3), 11, 0.0)
    catalog.repairs.finish(order, 0.0)
    again = start(catalog, 100.0)
    assert (again.reason, again.replay) == ("overflow", None)


def test_a_replay_of_a_worker_that_has_restarted_is_void(catalog: Catalog) -> None:
    deliver(catalog, 12, batch(stored(2), seq=3))
    order = start(catalog)
    catalog.joined(a_worker(incarnation=2), 0.0)
    assert not catalog.repairs.replay(order, batch(stored(1), seq=2), 11, 0.0)
    assert not catalog.repairs.finish(order, 0.0)
    assert depth(catalog, 1) == 0


def test_events_that_a_worker_says_it_has_sent_are_looked_for_in_the_stream_first(catalog: Catalog) -> None:
    catalog.load_report(load_report(3), 5.0)
    order = start(catalog, 6.0)
    assert (order.reason, order.replay) == ("lag", Replay(G1, after=10))
    catalog.repairs.replay(order, batch(stored(1), stored(2, parent=1), seq=2), 11, 6.0)
    assert catalog.repairs.finish(order, 6.0)
    assert depth(catalog, 1, 2) == 2


def test_in_a_new_stream_positions_of_the_former_one_mean_nothing(catalog: Catalog) -> None:
    catalog.stream_replaced(0.0)
    deliver(catalog, 1, batch(stored(2), seq=5))
    assert start(catalog).replay == Replay(G1, after=0)


@pytest.mark.parametrize("what", ["hole", "replaced", "reconnected"])
def test_who_sends_no_load_reports_is_asked_when_events_may_have_been_lost(catalog: Catalog, what: str) -> None:
    catalog.joined(a_kvbm(), 0.0)
    first = start(catalog)
    catalog.repairs.chunk(first, chunk(0, worker="k1", tier="g2"), 0.0)
    catalog.repairs.finish(first, 0.0)
    deliver(catalog, 11, batch(stored(1), seq=2))
    assert catalog.repairs.in_phase(Phase.LIVE) == 2
    match what:
        case "hole":
            deliver(catalog, 13, batch(stored(2), seq=3))
        case "replaced":
            catalog.stream_replaced(0.0)
        case "reconnected":
            catalog.reconnected(0.0)
    order = start(catalog, 1.0)
    assert (order.instance_id, order.replay) == ("k1", None)


@pytest.mark.parametrize("phase", [Phase.WANTED, Phase.FETCHING])
def test_events_that_may_be_lost_during_a_repair_are_asked_for_after_it(catalog: Catalog, phase: Phase) -> None:
    catalog.joined(a_kvbm(), 0.0)
    first = start(catalog)
    catalog.repairs.chunk(first, chunk(0, worker="k1", tier="g2"), 0.0)
    catalog.repairs.finish(first, 0.0)
    deliver(catalog, 11, batch(stored(1), seq=3, worker="k1", tier="g2"))
    replay = start(catalog) if phase is Phase.FETCHING else None
    assert catalog.repairs.in_phase(phase) == 1
    catalog.reconnected(0.0)
    if replay is not None:
        assert not catalog.repairs.finish(replay, 0.0)
    again = start(catalog, 1.0)
    assert (again.reason, again.replay) == ("reconnected", None)


def test_feeds_of_which_the_stream_holds_nothing_any_more_are_asked_for_at_the_start() -> None:
    """A kvbm holds blocks of two models; all events of one have expired, those of the other are all there."""
    catalog = Catalog(Limits(), PlainIndex)
    catalog.joined(a_kvbm(), 0.0)
    catalog.joined(a_worker(), 0.0)
    deliver(catalog, 40, batch(stored(1), seq=1, worker="k1", tier="g2"))
    deliver(catalog, 41, batch(stored(1), seq=1))
    catalog.stream_caught_up(0.0)
    order = start(catalog)
    assert (order.instance_id, order.reason, order.replay) == ("k1", "unseen", None)
