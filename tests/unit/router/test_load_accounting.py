"""News of load that come early, late, twice or out of order; and workers that know better than the router."""

from collections.abc import Sequence
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus_router.core.dispatcher import Dispatcher, Queued
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.news import REORDER_MS, Correction, EarlyNews, EndedRequests, Heard, is_later
from kvbus_router.core.policies import KvPolicy
from kvbus_router.core.state import Ending, RouterState
from kvbus_router.core.workers import MOST_OVERTAKEN, Reservation, Totals
from kvbus_testkit.routing import MODEL, chain, report, request, worker_record
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_tokens
from kvbus_wire.router import Decision


def reservation(request_id: str, worker_id: str = "w1", *, at: float = 0.0, uncached: int = 100) -> Reservation:
    return Reservation(
        request_id=request_id,
        worker_id=worker_id,
        incarnation=1,
        prompt_tokens=100,
        uncached_tokens=uncached,
        expected_output=10,
        placed_at=at,
        decided=(1000, "mine"),
    )


def decision(request_id: str, worker_id: str = "w1", *, ms: int = 2000, incarnation: int = 1) -> Decision:
    return Decision(
        router_id="other",
        request_id=request_id,
        model=MODEL,
        worker_id=worker_id,
        incarnation=incarnation,
        prompt_tokens=100,
        uncached_tokens=60,
        expected_output=10,
        keys=chain(1, 2),
        decided_ms=ms,
        tenant="t",
    )


def told(worker_id: str = "w1", *, seq: int = 0, said: Sequence[int] = (), **fields: Any) -> LoadReport:
    made = report(worker_id, **fields)
    return msgspec.structs.replace(made, seq=seq, output_tokens=pack_tokens(said))


@pytest.fixture
def state() -> RouterState:
    state = RouterState(Limits(reservation_grace_s=5.0))
    state.joined(worker_record("w1"))
    state.joined(worker_record("w2"))
    return state


def totals(state: RouterState, worker_id: str = "w1") -> Totals:
    state.check_integrity()
    worker = state.worker(worker_id)
    assert worker is not None
    return worker.totals


def corrections(state: RouterState) -> dict[Correction, int]:
    return {kind: count for kind, count in state.corrections.items() if count}


# -- reports


def test_a_report_that_was_overtaken_by_a_later_one_changes_nothing(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    assert state.load_report(told(seq=2, running=1, ids=["r"]), 0.2) is Heard.APPLIED
    assert state.load_report(told(seq=1), 0.3) is Heard.REORDERED
    assert state.reservation("r") is not None, "it is not over, however it looks to the older report"
    state.finished("r")
    assert state.load_report(told(seq=2, running=1, ids=["r"]), 0.4) is Heard.REORDERED
    assert totals(state) == Totals(0, 0, 0), "a report that comes twice counts nothing anew"


def test_a_report_with_a_number_from_nowhere_does_not_silence_its_worker(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.load_report(told(seq=1 << 62, running=1, ids=["r"]), 0.1)
    heard = [state.load_report(told(seq=seq), 0.2) for seq in range(1, MOST_OVERTAKEN + 2)]
    assert heard == [Heard.REORDERED] * (MOST_OVERTAKEN - 1) + [Heard.APPLIED] * 2
    assert state.reservation("r") is None


def test_one_late_report_that_comes_again_and_again_never_counts(state: RouterState) -> None:
    state.load_report(told(seq=100), 0.1)
    assert {state.load_report(told(seq=9), 0.2) for _ in range(3 * MOST_OVERTAKEN)} == {Heard.REORDERED}


@pytest.mark.parametrize("told_rate", [inf, nan, -1.0, 1e300])
def test_a_rate_that_cannot_be_counts_as_not_measured(state: RouterState, told_rate: float) -> None:
    report = msgspec.structs.replace(
        told(seq=1),
        prefill_tokens_per_s=told_rate,
        decode_step_s=told_rate,
        onboard_tokens_per_s={"g2": told_rate},
    )
    state.load_report(report, 0.1)
    worker = state.worker("w1")
    assert worker is not None
    assert worker.prefill_tokens_per_s == worker.worker.prefill_tokens_per_s
    assert worker.decode_step_s == worker.worker.decode_step_s
    assert worker.onboard_tokens_per_s("g2") == 0.0


def test_reports_of_workers_that_do_not_number_them_all_count(state: RouterState) -> None:
    assert [state.load_report(told(), 0.0) for _ in range(2)] == [Heard.APPLIED] * 2


def test_an_end_that_was_told_while_the_report_was_on_its_way_is_taken_off_it(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.finished("r")
    state.load_report(told(running=1, waiting_tokens=100, ids=["r"]), 0.1)
    assert totals(state) == Totals(active=0, running=0, waiting_tokens=0)
    assert corrections(state) == {Correction.LATE: 1}


def test_a_request_that_outlives_its_end_counts_as_long_as_its_worker_lists_it(state: RouterState) -> None:
    state.reserve(reservation("r"), b"")
    state.finished("r")
    for now in (0.1, 0.4, 0.7):
        state.load_report(told(running=1, ids=["r"]), now)
    assert totals(state).active == 1
    assert corrections(state) == {Correction.LATE: 1, Correction.OUTLIVED: 1}
    state.load_report(told(), 1.0)
    assert totals(state).active == 0
    assert state.endings == {**dict.fromkeys(Ending, 0), Ending.FINISHED: 1, Ending.VANISHED: 1}


def test_requests_under_way_are_taken_over_by_a_router_that_starts(state: RouterState) -> None:
    state.load_report(told(running=1, waiting_tokens=70, ids=["a", "b"], said=[3, 0]), 0.0)
    assert corrections(state) == {Correction.ADOPTED: 2}
    assert totals(state) == Totals(active=1, running=1, waiting_tokens=70), "what is adopted is in the numbers already"
    assert state.reservations == 2
    state.load_report(told(running=2, ids=["a", "b"], said=[5, 1]), 0.5)
    assert state.finished("a")
    assert totals(state) == Totals(active=1, running=1, waiting_tokens=0)


def test_what_there_is_no_room_for_counts_by_the_report_alone() -> None:
    state = RouterState(Limits(max_reservations=1))
    state.joined(worker_record("w1"))
    state.load_report(told(running=2, ids=["a", "b"]), 0.0)
    assert (state.reservations, totals(state).active) == (1, 2)
    assert corrections(state) == {Correction.ADOPTED: 1, Correction.UNTRACKED: 1}


def test_the_worker_knows_best_where_a_request_runs(state: RouterState) -> None:
    state.reserve(reservation("r", "w1"), chain(1))
    state.load_report(told("w2", running=1, ids=["r"]), 0.1)
    assert (totals(state, "w1").active, totals(state, "w2").active) == (0, 1)
    assert corrections(state) == {Correction.MOVED: 1}
    assert state.inflight.depths(chain(1), 0.1) == {}
    state.load_report(told("w1", running=1, ids=["r"]), 0.2)
    held = state.reservation("r")
    assert held is not None
    assert held.worker_id == "w2", "two workers list it: it stays where it is"


def test_of_a_report_that_lists_only_a_part_nothing_is_concluded_from_the_rest(state: RouterState) -> None:
    state.reserve(reservation("listed"), b"")
    state.load_report(told(running=1, ids=["listed"]), 0.1)
    state.reserve(reservation("young", at=0.2), b"")
    state.load_report(msgspec.structs.replace(told(running=1), ids_cut=True), 100.0)
    assert state.reservations == 2
    state.load_report(told(), 101.0)
    assert (state.reservations, state.endings[Ending.VANISHED], state.endings[Ending.NOT_ARRIVED]) == (0, 1, 1)


def test_output_shows_that_nothing_is_left_to_compute_before_anybody_tells_of_a_first_token(state: RouterState) -> None:
    state.reserve(reservation("r", uncached=100), b"")
    state.load_report(told(running=1, waiting_tokens=30, ids=["r"], said=[1]), 0.1)
    state.first_token("r", 0.2)
    assert totals(state) == Totals(active=1, running=1, waiting_tokens=30), "the 30 are of others"


def test_a_clock_that_stood_still_or_ran_ahead_costs_one_report(state: RouterState) -> None:
    """The process was stopped for a minute: a report from before is read after it, and looks as if the request had not arrived."""
    state.reserve(reservation("r", at=0.0), b"")
    state.load_report(told(seq=1), 60.0)
    assert state.reservation("r") is None
    state.load_report(told(seq=2, running=1, ids=["r"]), 60.1)
    assert state.reservation("r") is not None
    assert corrections(state) == {Correction.ADOPTED: 1}
    assert totals(state).active == 1


# -- decisions


def test_a_decision_that_comes_after_the_end_of_its_request_places_nothing(state: RouterState) -> None:
    assert not state.finished("r")
    assert state.apply_decision(decision("r"), 0.0) is Heard.ENDED
    assert totals(state).active == 0
    state.reserve(reservation("r"), b"")
    assert totals(state).active == 1, "an id that is asked for again here is a request again"


def test_decisions_and_reports_that_come_before_the_record_of_their_worker_count_once_it_is_there() -> None:
    state = RouterState(Limits())
    assert state.apply_decision(decision("r", incarnation=2), 1.0) is Heard.EARLY
    assert state.load_report(msgspec.structs.replace(told(running=3, ids=["x"]), incarnation=2), 1.0) is Heard.EARLY
    state.joined(worker_record("w1", incarnation=2))
    assert totals(state).active == 4
    assert {state.reservation(r) is not None for r in ("r", "x")} == {True}
    assert len(state.early) == 0


def test_early_news_of_another_incarnation_or_of_an_ended_request_are_dropped() -> None:
    state = RouterState(Limits())
    state.apply_decision(decision("old", incarnation=1), 0.0)
    state.apply_decision(decision("ended", incarnation=2), 0.0)
    state.finished("ended")
    state.joined(worker_record("w1", incarnation=2))
    assert totals(state).active == 0


def test_a_worker_that_restarts_with_its_id_starts_with_what_was_heard_of_its_new_incarnation(
    state: RouterState,
) -> None:
    state.reserve(reservation("old"), b"")
    assert state.apply_decision(decision("new", incarnation=2), 0.0) is Heard.EARLY
    state.joined(worker_record("w1", incarnation=2))
    assert (state.reservation("old"), totals(state).active) == (None, 1)
    assert state.load_report(told(running=9), 1.0) is Heard.OLD_INCARNATION


def test_a_decision_that_comes_after_the_report_that_lists_its_request_counts_nothing_twice(state: RouterState) -> None:
    state.load_report(told(running=0, waiting_tokens=60, ids=["r"]), 0.0)
    before = totals(state)
    assert state.apply_decision(decision("r"), 0.1) is Heard.APPLIED
    assert totals(state) == before
    held = state.reservation("r")
    assert held is not None
    assert (held.uncached_tokens, held.flow.tenant, held.reported_tokens) == (60, "t", 60)
    assert state.inflight.depths(chain(1, 2), 0.1) == {"w1": 2}
    assert state.apply_decision(decision("r"), 0.2) is Heard.KNOWN
    state.first_token("r", 0.3)
    assert totals(state).waiting_tokens == 0


def test_of_two_decisions_on_a_request_the_later_one_counts_in_whatever_order_they_come(state: RouterState) -> None:
    assert state.apply_decision(decision("r", "w2", ms=2000), 0.0) is Heard.APPLIED
    assert state.apply_decision(decision("r", "w1", ms=1999), 0.1) is Heard.SUPERSEDED
    assert state.apply_decision(decision("r", "w1", ms=2001), 0.2) is Heard.APPLIED
    state.load_report(told("w1", running=1, ids=["r"]), 0.3)
    assert state.apply_decision(decision("r", "w2", ms=3000), 0.4) is Heard.SUPERSEDED, "its worker has it"


def test_a_wall_clock_that_is_put_right_does_not_keep_later_decisions_out() -> None:
    assert not is_later((1, "a"), (2, "a"))
    assert not is_later((2, "a"), (2, "b"))
    assert not is_later((0, "a"), (REORDER_MS, "a"))
    assert is_later((0, "a"), (REORDER_MS + 1, "a")), "an hour ahead until just now"


def test_a_request_that_runs_elsewhere_does_not_wait_here() -> None:
    router = Dispatcher("mine", Limits(max_requests_per_worker=1), Weights(), KvPolicy(), Random(1))
    router.joined(worker_record("w1"), 0.0)
    router.submit(request("first"), (), 1e6, 0.0)
    assert isinstance(router.submit(request("second"), (), 1e6, 0.0)[0], Queued)
    router.load_report(told("w2", running=1, ids=["second"]), 0.1)
    settled = router.joined(worker_record("w2"), 0.2)
    assert [one.request_id for one in settled] == ["second"]
    assert router.waiting == 0
    router.check_integrity()


def test_whoever_stops_waiting_for_an_answer_may_ask_another_router() -> None:
    router = Dispatcher("mine", Limits(), Weights(), KvPolicy(), Random(1))
    router.joined(worker_record("w1"), 0.0)
    router.submit(request("r"), (), 1e6, 0.0)
    assert router.give_up("r")
    assert router.apply_decision(decision("r"), 0.1) == (Heard.APPLIED, [])
    assert router.state.endings[Ending.GIVEN_UP] == 1


# -- limits


def test_early_news_are_bounded_and_the_oldest_are_forgotten() -> None:
    early = EarlyNews(2)
    for request_id in ("a", "b", "b", "c"):
        early.keep(decision(request_id), 0.0)
    assert [news.request_id for news, _ in early.take("w1") if isinstance(news, Decision)] == ["b", "c"]


def test_ended_requests_are_bounded_and_the_oldest_are_forgotten() -> None:
    ended = EndedRequests(2)
    for request_id in ("a", "b", "a", "c"):
        ended.add(request_id)
    assert [request_id in ended for request_id in "abc"] == [True, False, True]
