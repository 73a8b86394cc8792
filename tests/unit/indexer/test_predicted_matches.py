"""What is believed of a worker before its events tell, or instead of them."""

import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.limits import Limits
from kvbus_indexer.core.predictions import Ending
from kvbus_indexer.core.sources import Silence
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, chunk, decision, load_report, stored
from kvbus_testkit.instances import block_keys
from kvbus_wire.kv_events import Cleared
from kvbus_wire.packing import short_keys
from kvbus_wire.router import Progress


class Harness:
    def __init__(self, **limits: float) -> None:
        self.endings: list[Ending] = []
        self.catalog = Catalog(Limits(**limits), PlainIndex, None, self.endings.append)  # type: ignore[arg-type]
        self.catalog.joined(a_worker("w1", total_blocks=8), 0.0)
        self.catalog.joined(a_worker("mute", total_blocks=8, kv_events=False), 0.0)
        self.catalog.joined(a_kvbm(), 0.0)
        self.catalog.stream_caught_up(0.0)
        for order in self.catalog.repairs.due(0.0):
            tier = "g2" if order.instance_id == "k1" else "g1"
            self.catalog.repairs.chunk(order, chunk(0, worker=order.instance_id, tier=tier), 0.0)
            self.catalog.repairs.finish(order, 0.0)

    def progress(self, request_id: str, phase: str, now: float) -> None:
        self.catalog.progress(Progress(request_id=request_id, model=MODEL, phase=phase), now)

    def found(self, *numbers: int, now: float = 0.0) -> dict[tuple[str, bool], int]:
        self.catalog.check_integrity()
        matches = self.catalog.match(MODEL, short_keys(block_keys(*numbers)), now)
        return {(match.instance_id, match.predicted): match.depth for match in matches}


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_prefix_is_predicted_until_the_events_tell_of_it(harness: Harness) -> None:
    assert harness.catalog.decided(decision("r1", 1, 2, 3), 0.0)
    assert harness.found(1, 2, 9) == {("w1", True): 2}
    harness.catalog.apply(batch(stored(1, 2), seq=1), 0.0)
    assert harness.found(1, 2, 3) == {("w1", True): 3, ("w1", False): 2}
    harness.catalog.apply(batch(stored(3, parent=2), seq=2), 0.0)
    assert harness.found(1, 2, 3) == {("w1", False): 3}
    assert harness.endings == [Ending.CONFIRMED]


def test_a_prediction_that_no_event_confirms_ends_a_moment_after_the_first_token() -> None:
    harness = Harness(confirm_s=2.0, predicted_ttl_s=60.0)
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    harness.progress("r1", "first_token", 30.0)
    harness.progress("r1", "finished", 31.0)
    assert harness.found(1, 2, now=31.9) == {("w1", True): 2}
    assert harness.found(1, 2, now=32.0) == {}
    assert harness.endings == [Ending.EXPIRED]


def test_a_request_that_ends_without_a_token_leaves_nothing(harness: Harness) -> None:
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    harness.progress("r1", "finished", 1.0)
    harness.progress("r1", "first_token", 1.0)
    assert harness.found(1, 2, now=1.0) == {}
    assert harness.endings == [Ending.NOT_COMPUTED]


def test_one_that_never_gets_a_token_ends_at_its_deadline() -> None:
    harness = Harness(predicted_ttl_s=60.0)
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    assert harness.found(1, 2, now=59.9) == {("w1", True): 2}
    assert harness.found(1, 2, now=60.0) == {}


def test_a_worker_without_events_is_believed_to_hold_what_it_was_sent_for_some_time() -> None:
    harness = Harness(approximate_ttl_s=120.0)
    harness.catalog.decided(decision("r1", 1, 2, worker="mute"), 0.0)
    harness.progress("r1", "first_token", 1.0)
    harness.catalog.decided(decision("r2", 1, 2, 3, worker="mute"), 100.0)
    harness.progress("r2", "first_token", 100.0)
    assert harness.found(1, 2, 3, now=200.0) == {("mute", True): 3}
    assert harness.found(1, 2, 3, now=219.9) == {("mute", True): 3}
    assert harness.found(1, 2, 3, now=220.0) == {}


def test_without_the_approximate_mode_it_is_believed_to_compute_and_no_more() -> None:
    harness = Harness(approximate=False, confirm_s=2.0)
    harness.catalog.decided(decision("r1", 1, 2, worker="mute"), 0.0)
    harness.progress("r1", "first_token", 0.0)
    assert harness.found(1, 2, now=1.0) == {("mute", True): 2}
    assert harness.found(1, 2, now=2.0) == {}


def test_a_worker_is_believed_to_hold_no_more_than_it_can(harness: Harness) -> None:
    harness.catalog.decided(decision("r1", 1, 2, 3, 4, worker="mute"), 0.0)
    harness.catalog.decided(decision("r2", 1, 12, 13, 14, 15, worker="mute"), 0.0)
    assert harness.found(1, 2, 3, 4) == {("mute", True): 4}
    harness.catalog.decided(decision("r3", 20, worker="mute"), 0.0)
    assert harness.found(1, 2, 3, 4) == {("mute", True): 1}
    assert harness.endings == [Ending.WORKER_FULL]
    harness.catalog.decided(decision("r4", *range(30, 60), worker="mute"), 0.0)
    assert harness.found(*range(30, 60)) == {("mute", True): 8}


def test_the_table_at_its_limit_gives_up_the_oldest() -> None:
    harness = Harness(max_predicted_keys=4)
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    harness.catalog.decided(decision("r2", 5, 6), 0.0)
    assert harness.found(1, 2)
    harness.catalog.decided(decision("r3", 7), 0.0)
    assert not harness.found(1, 2)
    assert harness.found(5, 6)
    assert harness.endings == [Ending.TABLE_FULL]


@pytest.mark.parametrize("how", ["left", "restarted", "cleared"])
def test_of_a_worker_that_is_gone_restarts_or_clears_nothing_is_predicted(harness: Harness, how: str) -> None:
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    match how:
        case "left":
            harness.catalog.left("w1")
        case "restarted":
            harness.catalog.joined(a_worker(incarnation=2), 0.0)
        case "cleared":
            harness.catalog.apply(batch(Cleared(), seq=1), 0.0)
    assert harness.found(1, 2) == {}
    assert harness.endings == [Ending.WORKER_GONE]


def test_a_decision_for_who_is_not_there_predicts_nothing(harness: Harness) -> None:
    assert not harness.catalog.decided(decision("r1", 1, worker="stranger"), 0.0)
    assert not harness.catalog.decided(decision("r1", 1, incarnation=9), 0.0)
    assert harness.found(1) == {}


def test_a_request_that_is_placed_anew_is_predicted_where_it_is_now(harness: Harness) -> None:
    harness.catalog.decided(decision("r1", 1, 2), 0.0)
    harness.catalog.decided(decision("r1", 1, 2, worker="mute"), 0.0)
    assert harness.found(1, 2) == {("mute", True): 2}
    assert harness.endings == [Ending.MOVED]


def test_the_first_event_of_a_worker_ends_the_guessing() -> None:
    harness = Harness(events_grace_s=30.0)
    harness.catalog.load_report(load_report(0, used_blocks=5), 0.0)
    harness.catalog.load_report(load_report(0, used_blocks=5), 30.0)
    assert harness.catalog.silent_workers(30.0) == {"mute": Silence.DECLARED, "w1": Silence.SILENT}
    harness.catalog.decided(decision("r1", 1, 2), 30.0)
    harness.progress("r1", "first_token", 30.0)
    assert harness.found(1, 2, now=100.0) == {("w1", True): 2}
    harness.catalog.apply(batch(stored(7), seq=1), 100.0)
    assert harness.found(1, 2, now=100.0) == {}
    assert harness.catalog.silent_workers(100.0) == {"mute": Silence.DECLARED}


def test_a_worker_without_events_is_never_asked_for_a_snapshot() -> None:
    catalog = Catalog(Limits(), PlainIndex)
    catalog.joined(a_worker("mute", kv_events=False), 0.0)
    catalog.stream_caught_up(0.0)
    catalog.joined(a_worker("mute", incarnation=2, kv_events=False), 0.0)
    assert not catalog.repairs.due(100.0)
