from collections.abc import Sequence

import pytest

from kvbus_blocks.chains import common_blocks
from kvbus_router.core.inflight import InFlightPrefixes
from kvbus_router.core.limits import Limits
from kvbus_router.core.news import Heard
from kvbus_router.core.state import Ending, RouterState
from kvbus_router.core.workers import Reservation, Totals
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord
from kvbus_wire.router import Decision

MODEL = "m"


def record(
    worker_id: str = "w1", incarnation: int = 1, *, draining: bool = False, model: str = MODEL
) -> InstanceRecord:
    card = ModelCard(name=model, fingerprint="f", block_size=16, context_length=4096, bundle="b", kv_layout="l")
    worker = WorkerRecord(
        model=card,
        engine="mock",
        total_blocks=100,
        max_num_seqs=4,
        max_batched_tokens=512,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )
    return InstanceRecord(
        service="worker",
        instance_id=worker_id,
        incarnation=incarnation,
        host_id="h",
        version="1",
        started_ms=0,
        draining=draining,
        worker=worker,
    )


def report(
    *,
    running: int = 0,
    waiting: int = 0,
    waiting_tokens: int = 0,
    ids: Sequence[str] = (),
    worker_id: str = "w1",
    incarnation: int = 1,
) -> LoadReport:
    return LoadReport(
        instance_id=worker_id,
        incarnation=incarnation,
        model=MODEL,
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        used_blocks=0,
        total_blocks=100,
        kv_seq=0,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        request_ids=tuple(ids),
    )


def reservation(request_id: str, worker_id: str = "w1", *, at: float = 0.0, uncached: int = 100) -> Reservation:
    return Reservation(
        request_id=request_id,
        worker_id=worker_id,
        incarnation=1,
        prompt_tokens=100,
        uncached_tokens=uncached,
        expected_output=10,
        placed_at=at,
    )


def decision(request_id: str, worker_id: str = "w1", incarnation: int = 1) -> Decision:
    return Decision(
        router_id="other",
        request_id=request_id,
        model=MODEL,
        worker_id=worker_id,
        incarnation=incarnation,
        prompt_tokens=100,
        uncached_tokens=60,
        expected_output=10,
        keys=bytes(32),
    )


@pytest.fixture
def state() -> RouterState:
    state = RouterState(Limits(reservation_grace_s=5.0))
    state.joined(record("w1"))
    state.joined(record("w2"))
    return state


def totals(state: RouterState, worker_id: str = "w1") -> Totals:
    state.check_integrity()
    worker = state.worker(worker_id)
    assert worker is not None
    return worker.totals


def test_a_reservation_counts_from_its_placement_to_its_end(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    assert totals(state) == Totals(active=1, running=0, waiting_tokens=100)
    state.first_token("r", 1.0)
    assert totals(state) == Totals(active=1, running=1, waiting_tokens=0)
    assert state.finished("r")
    assert not state.finished("r")
    assert totals(state) == Totals(0, 0, 0)


def test_what_a_report_lists_is_not_counted_twice(state: RouterState) -> None:
    state.reserve(reservation("listed"), b"")
    state.reserve(reservation("young", at=1.0, uncached=40), b"")
    state.load_report(report(running=2, waiting=1, waiting_tokens=70, ids=["listed", "foreign", "foreign2"]), 1.0)
    assert totals(state) == Totals(active=4, running=2, waiting_tokens=110)


def test_progress_after_a_report_is_taken_off_its_numbers(state: RouterState) -> None:
    state.reserve(reservation("a", uncached=50), b"")
    state.reserve(reservation("b", uncached=30), b"")
    state.reserve(reservation("c", uncached=20), b"")
    state.first_token("c", 0.5)
    state.load_report(report(running=3, waiting_tokens=80, ids=["a", "b", "c"]), 1.0)
    state.first_token("a", 1.5)
    assert totals(state) == Totals(active=3, running=3, waiting_tokens=30)
    state.finished("a")
    state.finished("c")
    assert totals(state) == Totals(active=1, running=1, waiting_tokens=30)
    state.finished("b")
    assert totals(state) == Totals(0, 0, 0)


def test_a_reservation_never_ends_by_age_alone(state: RouterState) -> None:
    state.reserve(reservation("old"), b"")
    for second in range(0, 100_000, 1000):
        state.load_report(report(running=1, ids=["old"]), float(second))
    assert state.reservation("old") is not None


def test_a_request_that_never_reached_its_worker_is_let_go_after_the_grace(state: RouterState) -> None:
    state.reserve(reservation("lost", at=10.0), b"")
    state.load_report(report(), 15.0)
    assert state.reservation("lost") is not None
    state.load_report(report(), 15.1)
    assert state.reservation("lost") is None
    assert state.endings[Ending.NOT_ARRIVED] == 1


def test_a_request_that_was_listed_and_is_no_more_has_ended(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.load_report(report(running=1, ids=["r"]), 0.1)
    state.load_report(report(), 0.2)
    assert state.reservations == 0
    assert state.endings[Ending.VANISHED] == 1
    assert totals(state) == Totals(0, 0, 0)


def test_asking_again_moves_the_reservation(state: RouterState) -> None:
    state.reserve(reservation("r", "w1"), b"")
    state.reserve(reservation("r", "w2"), b"")
    assert totals(state, "w1") == Totals(0, 0, 0)
    assert totals(state, "w2").active == 1
    assert state.endings[Ending.MOVED] == 1


def test_a_worker_that_is_gone_or_came_back_anew_has_no_reservations(state: RouterState) -> None:
    state.reserve(reservation("a", "w1"), bytes(16))
    state.reserve(reservation("b", "w2"), bytes(16))
    state.left(record("w1"))
    assert state.worker("w1") is None
    state.joined(record("w2", incarnation=2))
    assert totals(state, "w2") == Totals(0, 0, 0)
    assert state.endings[Ending.WORKER_GONE] == 2
    assert state.reservations == 0
    assert len(state.inflight) == 0


def test_news_of_an_old_incarnation_is_ignored(state: RouterState) -> None:
    state.joined(record("w1", incarnation=5))
    state.joined(record("w1", incarnation=1))
    state.left(record("w1", incarnation=1))
    assert state.load_report(report(running=9), 0.0) is Heard.OLD_INCARNATION
    assert state.load_report(report(running=9, worker_id="stranger"), 0.0) is Heard.EARLY
    assert state.apply_decision(decision("r"), 0.0) is Heard.OLD_INCARNATION
    worker = state.worker("w1")
    assert worker is not None
    assert worker.incarnation == 5
    assert totals(state) == Totals(0, 0, 0)


def test_an_updated_record_keeps_the_reservations(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.joined(record("w1", draining=True))
    worker = state.worker("w1")
    assert worker is not None
    assert worker.draining
    assert totals(state).active == 1


def test_a_worker_that_changes_its_model_starts_anew(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.joined(record("w1", model="other"))
    assert state.models == [MODEL, "other"]
    assert state.reservations == 0
    state.check_integrity()


def test_a_replicas_decision_counts_like_an_own_one(state: RouterState) -> None:
    assert state.apply_decision(decision("r", "w1"), 0.0) is Heard.APPLIED
    assert totals(state) == Totals(active=1, running=0, waiting_tokens=60)
    assert state.inflight.depths(bytes(32), 0.0) == {"w1": 2}
    assert state.apply_decision(decision("r", "w2"), 0.0) is Heard.APPLIED
    assert totals(state, "w1").active == 0


def test_decisions_beyond_the_limit_of_reservations_are_not_taken() -> None:
    state = RouterState(Limits(max_reservations=2))
    state.joined(record("w1"))
    state.joined(record("w2"))
    heard = [state.apply_decision(decision(r), 0.0) for r in ("a", "b", "c")]
    assert heard == [Heard.APPLIED, Heard.APPLIED, Heard.FULL]
    assert state.apply_decision(decision("a", "w2"), 0.0) is Heard.APPLIED, "one that is known may move"
    assert not state.can_reserve()
    state.check_integrity()


def test_reports_without_rates_leave_the_prior(state: RouterState) -> None:
    worker = state.worker("w1")
    assert worker is not None
    assert worker.prefill_tokens_per_s == 1000.0
    assert worker.decode_step_s == 0.01


def _chain(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(16, "little") for n in numbers)


@pytest.mark.parametrize("shared", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("rest", [0, 1, 5])
def test_the_common_part_of_two_chains_is_found(shared: int, rest: int) -> None:
    common = range(1, shared + 1)
    one = _chain(*common, *range(1000, 1000 + rest))
    other = _chain(*common, *range(2000, 2003))
    assert common_blocks(one, other) == shared
    assert common_blocks(other, one) == shared
    assert common_blocks(one, one) == shared + rest


def test_a_prefix_is_in_flight_until_a_moment_after_the_first_token() -> None:
    inflight = InFlightPrefixes(1 << 20, grace_s=2.0)
    inflight.add("r", "w1", _chain(1, 2, 3))
    inflight.add("s", "w1", _chain(1, 2))
    inflight.add("t", "w2", _chain(1, 9))
    assert inflight.depths(_chain(1, 2, 3, 4), 1000.0) == {"w1": 3, "w2": 1}
    inflight.computed("r", 1000.0)
    inflight.computed("r", 1001.0)
    assert inflight.depths(_chain(1, 2, 3), 1001.9) == {"w1": 3, "w2": 1}
    assert inflight.depths(_chain(1, 2, 3), 1002.0) == {"w1": 2, "w2": 1}
    inflight.discard_uncomputed("s")
    inflight.drop_worker("w2")
    assert inflight.depths(_chain(1, 2, 3), 1002.0) == {}
    assert len(inflight) == 0


def test_an_ended_request_leaves_its_prefix_only_if_it_was_computed() -> None:
    inflight = InFlightPrefixes(1 << 20, grace_s=2.0)
    inflight.add("done", "w1", _chain(1))
    inflight.add("failed", "w2", _chain(1))
    inflight.computed("done", 0.0)
    inflight.discard_uncomputed("done")
    inflight.discard_uncomputed("failed")
    assert inflight.depths(_chain(1), 1.0) == {"w1": 1}


def test_at_the_limit_the_oldest_prefixes_are_forgotten() -> None:
    inflight = InFlightPrefixes(64, grace_s=2.0)
    for number in range(6):
        inflight.add(f"r{number}", f"w{number}", _chain(1))
        inflight.check_integrity()
    inflight.add("huge", "w9", _chain(*range(1, 10)))
    assert inflight.depths(_chain(1), 0.0) == {"w2": 1, "w3": 1, "w4": 1, "w5": 1}
    assert inflight.key_bytes == 64


def test_prefixes_are_forgotten_by_a_router_that_only_hears_of_them() -> None:
    """All requests go to its replicas, so nobody asks for depths here."""
    inflight = InFlightPrefixes(1 << 20, grace_s=2.0)
    for second in range(100):
        inflight.add(f"r{second}", "w1", _chain(second + 1))
        inflight.computed(f"r{second}", float(second))
    assert len(inflight) == 2
    assert len(inflight._computed) == 2
    inflight.check_integrity()
