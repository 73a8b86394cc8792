from collections import Counter

import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.fates import Blocks, Fate
from kvbus_indexer.core.instance import Order, Phase
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, chain, chunk, load_report, stored
from kvbus_testkit.instances import block_keys
from kvbus_wire.kv_events import Cleared, Removed, Stored
from kvbus_wire.packing import short_keys
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain


class Harness:
    """A catalog whose counts can be read."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.counts: Counter[Fate | Blocks] = Counter()
        self.kinds: Counter[tuple[Fate, str]] = Counter()
        self.catalog = Catalog(limits or Limits(), PlainIndex, self)

    def events(self, fate: Fate, kind: str, count: int) -> None:
        self.counts[fate] += count
        self.kinds[fate, kind] += count

    def blocks(self, what: Blocks, count: int) -> None:
        self.counts[what] += count

    def live(self, *workers: str) -> Catalog:
        for worker in workers:
            self.catalog.joined(a_worker(worker), 0.0)
            self.catalog.apply(batch(Cleared(), seq=1, worker=worker), 0.0)
        self.catalog.stream_caught_up(0.0)
        return self.catalog

    def depths(self, *numbers: int, model: str = MODEL) -> dict[str, int]:
        self.catalog.check_integrity()
        found = self.catalog.match(model, short_keys(block_keys(*numbers)), 0.0)
        return {f"{m.instance_id}/{m.tier}": m.depth for m in found}

    def start(self, now: float) -> Order:
        """The snapshot that is due, after the stream was found to have lost what is missing."""
        (order,) = self.catalog.repairs.due(now)
        if order.replay is not None:
            assert not self.catalog.repairs.finish(order, now)
            (order,) = self.catalog.repairs.due(now)
        assert order.replay is None
        return order


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_events_in_order_become_depths(harness: Harness) -> None:
    catalog = harness.live("w1", "w2")
    catalog.apply(batch(stored(1, 2), stored(3, parent=2), seq=2), 0.0)
    catalog.apply(batch(stored(1), seq=2, worker="w2"), 0.0)
    catalog.apply(batch(Removed(block_keys(3)), seq=4), 0.0)
    assert harness.depths(1, 2, 3) == {"w1/g1": 2, "w2/g1": 1}
    assert not catalog.repairs.due(1.0)


def test_models_and_tiers_do_not_mix(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.joined(a_worker("w9", model="other"), 0.0)
    catalog.joined(a_kvbm(), 0.0)
    for order in catalog.repairs.due(0.0):
        catalog.repairs.finish(order, 0.0)
    catalog.apply(batch(stored(1), seq=1, worker="w9", model="other"), 0.0)
    catalog.apply(batch(stored(1, 2), seq=1, worker="k1", tier="g2"), 0.0)
    catalog.apply(batch(stored(1), seq=1, worker="k1", tier="g3"), 0.0)
    catalog.apply(batch(stored(1), seq=1, worker="k1", tier="g2", model="other"), 0.0)
    assert harness.depths(1, 2) == {"k1/g2": 2, "k1/g3": 1}
    assert harness.depths(1, 2, model="other") == {"w9/g1": 1, "k1/g2": 1}
    assert harness.depths(1, model="unheard of") == {}


def test_what_arrives_twice_is_applied_once(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), Removed(block_keys(1)), seq=2), 0.0)
    catalog.apply(batch(stored(1), Removed(block_keys(1)), stored(7), seq=2), 0.0)
    catalog.apply(batch(stored(1), seq=2), 0.0)
    assert harness.depths(1) == {}
    assert harness.depths(7) == {"w1/g1": 1}
    assert harness.counts[Fate.DUPLICATE] == 3


def test_a_gap_is_repaired_by_a_snapshot_with_later_events_on_top(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=2), 0.0)
    catalog.apply(batch(stored(3, parent=2), seq=4), 1.0)
    order = harness.start(1.0)
    assert order.reason == "gap"
    catalog.apply(batch(stored(4, parent=3), seq=5), 1.0)
    catalog.apply(batch(Removed(block_keys(4)), seq=6), 1.0)
    catalog.apply(batch(stored(9), seq=7), 1.0)
    assert catalog.repairs.chunk(order, chunk(5, chain(1, 2), next_cursor=1), 1.0)
    assert catalog.repairs.chunk(order, chunk(5, chain(3, 4, parent=2)), 1.0)
    assert catalog.repairs.finish(order, 1.0)
    assert harness.depths(1, 2, 3, 4) == {"w1/g1": 3}
    assert harness.depths(9) == {"w1/g1": 1}
    assert catalog.repairs.in_phase(Phase.LIVE) == 1


def test_a_second_gap_while_a_snapshot_is_fetched_is_repaired_too(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=5), 0.0)
    order = harness.start(0.0)
    catalog.apply(batch(stored(2), seq=9), 0.0)
    catalog.repairs.chunk(order, chunk(7, chain(1)), 0.0)
    catalog.repairs.finish(order, 0.0)
    assert catalog.repairs.in_phase(Phase.WANTED) == 1
    (replay,) = catalog.repairs.due(0.1)
    assert replay.replay is not None
    catalog.repairs.finish(replay, 0.1)
    assert not catalog.repairs.due(0.1), "not before the back-off"
    assert catalog.repairs.due(0.25)


def test_a_stale_incarnation_is_ignored_and_a_new_one_clears(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1, 2), seq=2), 0.0)
    catalog.joined(a_worker(incarnation=2), 0.0)
    order = harness.start(0.0)
    catalog.repairs.chunk(order, chunk(0, incarnation=2), 0.0)
    catalog.repairs.finish(order, 0.0)
    catalog.apply(batch(stored(5), seq=1, incarnation=2), 0.0)
    catalog.apply(batch(stored(6), seq=3, incarnation=1), 0.0)
    assert harness.depths(1, 2) == {}
    assert harness.depths(6) == {}
    assert harness.depths(5) == {"w1/g1": 1}
    assert harness.counts[Fate.STALE] == 1


def test_events_of_an_incarnation_that_the_directory_does_not_know_shut_nobody_out(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(9), seq=1, incarnation=2**63), 0.0)
    catalog.apply(batch(stored(1, 2), seq=2), 0.0)
    assert harness.depths(1, 2) == {"w1/g1": 2}
    assert harness.depths(9) == {}
    assert harness.counts[Fate.UNKNOWN_INSTANCE] == 1


def test_an_instance_that_is_gone_leaves_nothing_and_its_late_events_are_ignored(harness: Harness) -> None:
    catalog = harness.live("w1", "w2")
    catalog.apply(batch(stored(1, 2), seq=2), 0.0)
    catalog.left("w1")
    catalog.apply(batch(stored(3, parent=2), seq=3), 0.0)
    assert harness.depths(1, 2, 3) == {}
    assert harness.counts[Fate.UNKNOWN_INSTANCE] == 1
    assert catalog.content.entries == 0


def test_events_before_the_record_are_made_up_for_by_a_snapshot(harness: Harness) -> None:
    catalog = harness.live()
    catalog.apply(batch(stored(1, 2), seq=1), 0.0)
    catalog.joined(a_worker(), 0.0)
    order = harness.start(0.0)
    catalog.repairs.chunk(order, chunk(1, chain(1, 2)), 0.0)
    catalog.repairs.finish(order, 0.0)
    catalog.apply(batch(stored(3, parent=2), seq=2), 0.0)
    assert harness.depths(1, 2, 3) == {"w1/g1": 3}


def test_nothing_is_repaired_before_the_stream_has_caught_up(harness: Harness) -> None:
    catalog = harness.catalog
    catalog.joined(a_worker("w1"), 0.0)
    catalog.joined(a_worker("w2"), 0.0)
    catalog.joined(a_worker("w3"), 0.0)
    catalog.apply(batch(stored(1), seq=9), 0.0)
    catalog.apply(batch(stored(1), seq=1, worker="w2"), 0.0)
    assert not catalog.repairs.due(1.0)
    assert catalog.repairs.next_due() is None
    catalog.stream_caught_up(1.0)
    assert {order.instance_id: order.reason for order in catalog.repairs.due(1.0)} == {"w1": "gap", "w3": "unseen"}


def test_a_worker_that_has_sent_more_than_arrived_is_repaired_after_a_moment(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.load_report(load_report(2), 10.0)
    assert catalog.repairs.next_due() == 11.0
    assert not catalog.repairs.due(10.9)
    assert harness.start(11.0).reason == "lag"


def test_a_report_that_promises_more_than_there_is_costs_one_repair_only(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.load_report(load_report(2**63), 10.0)
    order = harness.start(11.0)
    catalog.repairs.chunk(order, chunk(1), 11.1)
    catalog.repairs.finish(order, 11.1)
    assert not catalog.repairs.due(60.0)


def test_events_that_were_only_late_need_no_repair(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.load_report(load_report(3), 10.0)
    catalog.apply(batch(stored(1), seq=2), 10.5)
    catalog.load_report(load_report(4), 10.6)
    catalog.apply(batch(stored(2), seq=3), 10.7)
    assert not catalog.repairs.due(12.0)
    catalog.load_report(load_report(9, incarnation=2), 12.0)
    catalog.load_report(load_report(9, worker="stranger"), 12.0)
    assert not catalog.repairs.due(20.0)


def test_failing_snapshots_back_off_and_at_last_the_content_is_given_up() -> None:
    harness = Harness(Limits(repair_backoff_s=1.0, repair_backoff_max_s=4.0, repair_give_up=3))
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=2), 0.0)
    catalog.apply(batch(stored(2), seq=4), 0.0)
    now, waits = 0.0, []
    for attempt in range(4):
        order = harness.start(now)
        assert harness.depths(1) == ({"w1/g1": 1} if attempt < 3 else {})
        catalog.repairs.fail(order, now)
        due = catalog.repairs.next_due()
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == [1.0, 2.0, 4.0, 4.0]
    order = harness.start(now)
    catalog.repairs.chunk(order, chunk(4, chain(2)), now)
    catalog.repairs.finish(order, now)
    assert harness.depths(2) == {"w1/g1": 1}


def test_only_so_many_repairs_run_at_once() -> None:
    harness = Harness(Limits(max_repairs=2))
    catalog = harness.live("w1", "w2", "w3")
    for worker in ("w1", "w2", "w3"):
        catalog.apply(batch(stored(1), seq=9, worker=worker), 0.0)
    first, second = catalog.repairs.due(0.0)
    assert not catalog.repairs.due(0.0)
    assert catalog.repairs.next_due() is None
    catalog.repairs.fail(first, 0.0)
    assert len(catalog.repairs.due(0.0)) == 1
    catalog.repairs.fail(second, 0.0)
    catalog.check_integrity()


def test_a_buffer_at_its_limit_is_dropped_and_the_repair_runs_again() -> None:
    harness = Harness(Limits(max_buffered_keys=4))
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=3), 0.0)
    order = harness.start(0.0)
    catalog.apply(batch(stored(1, 2, 3), seq=4), 0.0)
    assert not harness.counts[Fate.OVERFLOW]
    catalog.apply(batch(Cleared(), seq=5), 0.0)
    assert harness.counts[Fate.OVERFLOW] == 1
    catalog.check_integrity()
    catalog.repairs.chunk(order, chunk(3), 0.0)
    catalog.repairs.finish(order, 0.0)
    assert harness.start(1.0).reason == "overflow"


def test_a_snapshot_of_a_restarted_or_gone_instance_is_void(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=3), 0.0)
    order = harness.start(0.0)
    catalog.joined(a_worker(incarnation=2), 0.0)
    assert not catalog.repairs.chunk(order, chunk(3, chain(1)), 0.0)
    assert not catalog.repairs.finish(order, 0.0)
    catalog.repairs.fail(order, 0.0)
    assert harness.depths(1) == {}
    catalog.left("w1")
    catalog.joined(a_worker(), 1.0)
    again = harness.start(1.0)
    assert not catalog.repairs.chunk(order, chunk(3, chain(1)), 1.0)
    assert catalog.repairs.chunk(again, chunk(3, chain(1)), 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        chunk(3, chain(1), worker="w2"),
        chunk(3, chain(1), incarnation=2),
        chunk(3, SnapshotChain(parent=b"", keys=b"short")),
        chunk(3, SnapshotChain(parent=b"short", keys=block_keys(1))),
    ],
)
def test_a_snapshot_that_makes_no_sense_is_a_failure(harness: Harness, bad: BlockSnapshotChunk) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=3), 0.0)
    order = harness.start(0.0)
    assert not catalog.repairs.chunk(order, bad, 0.0)
    assert catalog.repairs.in_phase(Phase.WANTED) == 1
    assert harness.depths(1) == {}


def test_a_snapshot_that_changes_while_it_is_fetched_is_a_failure(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=3), 0.0)
    order = harness.start(0.0)
    assert catalog.repairs.chunk(order, chunk(3, chain(1)), 0.0)
    assert not catalog.repairs.chunk(order, chunk(4, chain(2)), 0.0)
    assert catalog.repairs.in_phase(Phase.WANTED) == 1


def test_a_snapshot_tells_of_every_tier_and_what_it_does_not_name_is_gone(harness: Harness) -> None:
    catalog = harness.live()
    catalog.joined(a_kvbm(), 0.0)
    order = harness.start(0.0)
    catalog.repairs.chunk(order, chunk(4, chain(1, 2), worker="k1", tier="g2"), 0.0)
    catalog.repairs.chunk(order, chunk(2, chain(1), worker="k1", tier="g3"), 0.0)
    catalog.repairs.finish(order, 0.0)
    assert harness.depths(1, 2) == {"k1/g2": 2, "k1/g3": 1}
    catalog.reconnected(5.0)
    order = harness.start(5.0)
    catalog.repairs.chunk(order, chunk(9, chain(1), worker="k1", tier="g2"), 5.0)
    catalog.repairs.finish(order, 5.0)
    assert harness.depths(1, 2) == {"k1/g2": 1}


def test_malformed_keys_cost_a_repair_and_nothing_else(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(Stored(b"", b"short"), seq=2), 0.0)
    assert harness.counts[Fate.INVALID] == 1
    assert harness.start(0.0).reason == "invalid"


def test_at_the_limit_an_instance_becomes_partial_and_is_completed_when_there_is_room() -> None:
    harness = Harness(Limits(max_entries=10, refill_ratio=0.5, refill_interval_s=30.0))
    catalog = harness.live("w1", "w2")
    catalog.apply(batch(stored(*range(1, 9)), seq=2), 0.0)
    catalog.apply(batch(stored(1, 2), seq=2, worker="w2"), 0.0)
    assert catalog.content.entries == 10
    catalog.apply(batch(stored(3, parent=2), stored(50), Removed(block_keys(2)), seq=3, worker="w2"), 0.0)
    assert harness.counts[Blocks.REFUSED] == 2
    assert catalog.partial_instances == 1
    assert harness.depths(1, 2, 3) == {"w1/g1": 3, "w2/g1": 1}
    catalog.apply(batch(stored(2, parent=1), seq=6, worker="w2"), 0.0)
    assert harness.depths(1, 2, 3) == {"w1/g1": 3, "w2/g1": 1}, "a partial instance takes nothing more"
    assert catalog.repairs.next_due() == 30.0
    assert not catalog.repairs.due(30.0), "there is no room yet"
    catalog.left("w1")
    (order,) = catalog.repairs.due(60.0)
    assert order.reason == "room"
    assert catalog.repairs.chunk(order, chunk(6, chain(1, 2, 3), chain(50), worker="w2"), 60.0)
    catalog.repairs.finish(order, 60.0)
    assert harness.depths(1, 2, 3) == {"w2/g1": 3}
    assert catalog.partial_instances == 0


def test_an_instance_may_not_invent_feeds_without_end() -> None:
    harness = Harness(Limits(max_feeds_per_instance=2))
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=1, tier="g2"), 0.0)
    catalog.apply(batch(stored(1), seq=1, tier="g3"), 0.0)
    assert harness.depths(1) == {"w1/g2": 1}
    assert harness.counts[Fate.TOO_MANY_FEEDS] == 1


def test_records_of_other_services_are_no_business_of_the_index(harness: Harness) -> None:
    record = InstanceRecord(service="frontend", instance_id="f", incarnation=1, host_id="h", version="1", started_ms=0)
    harness.catalog.joined(record, 0.0)
    harness.catalog.left("f")
    assert harness.catalog.instances == 0


def test_a_report_that_comes_while_a_snapshot_is_fetched_is_not_forgotten(harness: Harness) -> None:
    catalog = harness.live("w1")
    catalog.apply(batch(stored(1), seq=3), 0.0)
    order = harness.start(0.0)
    catalog.load_report(load_report(5), 0.5)
    catalog.repairs.chunk(order, chunk(4, chain(1)), 5.0)
    catalog.repairs.finish(order, 5.0)
    assert not catalog.repairs.due(5.9), "event 5 may still be on its way"
    assert harness.start(6.0).reason == "lag"
