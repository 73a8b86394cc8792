"""Sessions, taints, limits that change, explanations and feedback, as the dispatcher brings them together."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from kvbus_router.core.choosing import LEAST_FACTOR, MOST_FACTOR
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.policies import KvPolicy, Outcome, RoutingPolicy
from kvbus_testkit.routing import MODEL, chain, g1, kvbm_record, report, request, worker_record
from kvbus_wire.indexer import Match
from kvbus_wire.request import SessionRef
from kvbus_wire.router import Placement, RouteRequest

LATER = 1e6


def router(
    *names: str,
    limits: Limits | None = None,
    policy: RoutingPolicy | None = None,
    router_id: str = "router-a",
    ms: int = 1,
) -> Dispatcher:
    made = Dispatcher(router_id, limits or Limits(), Weights(), policy or KvPolicy(), Random(7), unix_ms=lambda: ms)
    for name in names:
        made.state.joined(worker_record(name))
    return made


def submit(to: Dispatcher, asked: RouteRequest, matches: Sequence[Match] = (), *, now: float = 0.0) -> Placed | Queued:
    outcome, _ = to.submit(asked, matches, LATER, now)
    to.check_integrity()
    assert isinstance(outcome, Placed | Queued)
    return outcome


def place(to: Dispatcher, asked: RouteRequest, matches: Sequence[Match] = (), *, now: float = 0.0) -> Placement:
    outcome = submit(to, asked, matches, now=now)
    assert isinstance(outcome, Placed)
    return outcome.placement


def test_a_session_stays_with_its_worker_when_nothing_else_tells_workers_apart() -> None:
    to = router("w1", "w2", "w3")
    workers = set()
    for turn in range(10):
        workers.add(place(to, request(f"r{turn}", session="s"), now=float(turn)).worker_id)
        to.finished(f"r{turn}")
    assert len(workers) == 1


def test_the_bonus_is_all_that_a_session_may_cost_more() -> None:
    to = router("w1", "w2", limits=Limits(affinity_bonus_s=0.5))
    assert place(to, request("first", session="s", allowed=["w1"])).worker_id == "w1"
    to.finished("first")
    to.state.load_report(report("w1", waiting_tokens=490), 1.0)
    assert place(to, request("second", session="s"), now=1.0).worker_id == "w1"
    to.finished("second")
    to.state.load_report(report("w1", waiting_tokens=510), 2.0)
    assert place(to, request("third", session="s"), now=2.0).worker_id == "w2"
    to.finished("third")
    assert place(to, request("fourth", session="s"), now=2.0).worker_id == "w2", "the session has moved"


def test_a_hard_session_waits_for_its_worker_as_long_as_that_may_take_requests() -> None:
    to = router("w1", "w2", limits=Limits(affinity="hard", max_requests_per_worker=1))
    place(to, request("first", session="s", allowed=["w1"]))
    assert isinstance(submit(to, request("second", session="s")), Queued)
    assert place(to, request("other")).worker_id == "w2"
    to.finished("first")
    (settled,) = to.pump(1.0)
    assert isinstance(settled.outcome, Placed)
    assert (settled.request_id, settled.outcome.placement.worker_id) == ("second", "w1")
    to.finished("other")
    assert place(to, request("third", session="s", excluded=["w1"])).worker_id == "w2", "a migration finds another"


def test_a_hard_session_goes_on_elsewhere_when_its_worker_is_gone() -> None:
    to = router("w1", "w2", limits=Limits(affinity="hard"))
    place(to, request("first", session="s", allowed=["w1"]))
    to.state.left(worker_record("w1"))
    assert place(to, request("second", session="s")).worker_id == "w2"


def test_affinity_can_be_off() -> None:
    to = router("w1", "w2", limits=Limits(affinity="off"))
    workers = {place(to, request(f"r{turn}", session="s")).worker_id for turn in range(2)}
    assert workers == {"w1", "w2"}
    assert len(to.affinity) == 0


def test_a_final_request_is_placed_with_its_session_and_ends_it() -> None:
    to = router("w1", "w2")
    first = place(to, request("first", session="s"))
    to.finished("first")
    last = msgspec.structs.replace(request("last"), session=SessionRef(id="s", final=True))
    assert place(to, last).worker_id == first.worker_id
    assert len(to.affinity) == 0


def test_a_replica_finds_the_worker_of_a_session() -> None:
    here, there = router("w1", "w2"), router("w1", "w2", router_id="router-b", ms=2)
    outcome = submit(here, request("first", session="s"))
    assert isinstance(outcome, Placed)
    there.apply_decision(outcome.decision, 0.0)
    there.finished("first")
    followed = submit(there, request("second", session="s"))
    assert isinstance(followed, Placed)
    assert followed.placement.worker_id == outcome.placement.worker_id
    assert followed.session == "same"


def test_required_taints_filter_and_preferred_ones_scale_the_cost() -> None:
    to = router("plain")
    to.state.joined(worker_record("tainted", taints=["h200", "spot"], rate=500.0))
    assert place(to, request("a", required_taints=("h200",))).worker_id == "tainted"
    to.finished("a")
    assert place(to, request("b")).worker_id == "plain", "it is faster"
    to.finished("b")
    assert place(to, request("c", preferred_taints={"h200": 0.4})).worker_id == "tainted"
    to.finished("c")
    assert place(to, request("d", preferred_taints={"h200": 0.4, "spot": 2.0})).worker_id == "plain"


def test_the_factors_of_a_worker_are_bounded_together() -> None:
    taints = [f"t{i}" for i in range(60)]
    to = router("plain")
    to.state.joined(worker_record("tainted", taints=taints))
    for factor, expected in ((MOST_FACTOR, "plain"), (LEAST_FACTOR, "tainted")):
        asked = request(expected, preferred_taints=dict.fromkeys(taints, factor))
        outcome = submit(to, asked)
        assert isinstance(outcome, Placed)
        assert outcome.placement.worker_id == expected
        assert outcome.chosen.bias.taint_factor == (LEAST_FACTOR if expected == "tainted" else 1.0)
        to.finished(expected)


def test_nobody_with_the_taint_is_nobody_for_the_request() -> None:
    to = router("w1")
    assert isinstance(submit(to, request("a", required_taints=("h200",))), Queued)
    assert to.next_due() == to.limits.worker_wait_s
    assert place(to, request("b")).worker_id == "w1"


def test_a_limit_that_is_raised_lets_those_in_who_wait() -> None:
    to = router("w1", limits=Limits(max_requests_per_worker=1))
    place(to, request("first"))
    assert isinstance(submit(to, request("second")), Queued)
    to.set_thresholds(Thresholds(max_requests_per_worker=2))
    assert [settled.request_id for settled in to.pump(1.0)] == ["second"]


def test_a_cordoned_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    to = router("w1", "w2")
    place(to, request("first", allowed=["w1"]))
    to.set_thresholds(Thresholds(cordoned=("w1",)))
    assert {place(to, request(f"r{i}")).worker_id for i in range(3)} == {"w2"}
    assert to.state.reservation("first") is not None


def test_a_busy_worker_is_passed_over_until_it_is_less_busy() -> None:
    to = router("w1", "w2", limits=Limits(busy_waiting_tokens=1000))
    keys = chain(1, 2, 3, 4)
    cached = [g1("w1", 4)]
    to.state.load_report(report("w1", running=1, waiting_tokens=1000, rate=1e9), 0.0)
    assert place(to, request("a", keys=keys), cached).worker_id == "w2"
    to.state.load_report(report("w1", running=1, waiting_tokens=999, rate=1e9), 1.0)
    assert place(to, request("b", keys=keys), cached, now=1.0).worker_id == "w1"


def test_a_placement_says_why_where_the_request_asks_for_it() -> None:
    to = router("w1", "w2", "w3")
    to.state.joined(worker_record("w4", draining=True))
    to.state.joined(kvbm_record("h"))
    keys = chain(1, 2, 3, 4)
    matches = [g1("w2", 2), Match(instance_id="kvbm-h", tier="g2", depth=4)]
    placement = place(to, request("r", keys=keys, prompt_tokens=70, explain=True, excluded=["w3"]), matches)
    told = placement.explanation
    assert told is not None
    assert (told.worker_id, told.policy, told.prompt_tokens, told.left_out) == ("w2", "kv", 70, 0)
    assert [(terms.worker_id, terms.verdict) for terms in told.workers] == [
        ("w2", ""),
        ("w1", ""),
        ("w3", "excluded"),
        ("w4", "draining"),
    ]
    best = told.workers[0]
    assert (best.cached_tokens, best.onboard[0].tokens, best.uncached_tokens) == (32, 32, 6)
    onboard_s = sum(part.seconds for part in best.onboard)
    assert best.ttft_s == pytest.approx(best.wait_s + onboard_s + best.prefill_s)
    assert best.cost_s == pytest.approx(
        (best.ttft_s + best.work_s + best.decode_s) * best.taint_factor - best.affinity_s
    )
    assert place(to, request("s")).explanation is None


def test_an_explanation_names_as_many_workers_as_the_limit_says_and_always_the_chosen_one() -> None:
    class Dearest:
        name = "dearest"

        def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
            return max(estimates, key=lambda estimate: estimate.cost_s)

    to = router(*(f"w{i}" for i in range(6)), limits=Limits(max_explained_workers=3), policy=Dearest())
    to.state.load_report(report("w5", waiting_tokens=5000), 0.0)
    told = place(to, request("r", explain=True, excluded=["w0"])).explanation
    assert told is not None
    assert (len(told.workers), told.left_out, told.workers[-1].worker_id) == (3, 3, "w5")
    off = router("w1", "w2", limits=Limits(max_explained_workers=0))
    told = place(off, request("r", explain=True)).explanation
    assert told is not None
    assert (told.workers, told.left_out) == ((), 2)


def test_a_question_places_nothing_and_asks_no_policy() -> None:
    to = router("w1", "w2")
    told = to.explain(request("r", session="s"), [g1("w2", 4)], 0.0)
    assert (told.worker_id, len(told.workers)) == ("", 2)
    assert to.state.reservations == 0
    assert len(to.affinity) == 0
    assert to.explain_placed("r") is None


def test_the_last_placements_can_be_explained_afterwards() -> None:
    to = router("w1", limits=Limits(max_explained_requests=2, max_requests_per_worker=9))
    for number in range(3):
        place(to, request(f"r{number}"), now=1.0)
    to.first_token("r2", 1.25)
    assert to.explain_placed("r0") is None
    assert to.explain_placed("r1") is not None
    told = to.explain_placed("r2")
    assert told is not None
    assert (told.worker_id, told.ttft_s) == ("w1", 0.25)


class Student:
    """Remembers what it is told."""

    name = "student"

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        return estimates[0]

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_a_learning_policy_is_told_once_how_long_each_of_its_choices_took() -> None:
    student = Student()
    to = router("w1", policy=student)
    place(to, request("r"), now=1.0)
    place(to, request("given up"), now=1.0)
    assert to.first_token("r", 1.5) is not None
    assert to.first_token("r", 1.75) is None
    assert to.first_token("unknown", 1.75) is None
    to.finished("given up")
    to.first_token("given up", 2.0)
    (outcome,) = student.outcomes
    assert (outcome.request_id, outcome.chosen.worker_id, outcome.ttft_s) == ("r", "w1", 0.5)
    assert outcome.chosen.ttft_s == pytest.approx(0.1)


def test_a_learning_policy_is_not_told_of_the_choices_of_replicas() -> None:
    student = Student()
    here, there = router("w1", policy=student), router("w1", router_id="router-b")
    outcome = submit(there, request("r"))
    assert isinstance(outcome, Placed)
    here.apply_decision(outcome.decision, 0.0)
    assert here.first_token("r", 0.5) is None
    assert student.outcomes == []
    worker = next(iter(here.state.workers(MODEL)))
    assert worker.totals.waiting_tokens == 0, "the load counts all the same"
