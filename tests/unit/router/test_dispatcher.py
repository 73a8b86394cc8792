from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused, Settled
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import BUILT_IN
from kvbus_testkit.routing import MODEL, chain, g1, kvbm_record, report, request, worker_record
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import Match
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Placement, RouteRequest

LATER = 1e6


class Router:
    """A dispatcher with workers, and short ways to ask it."""

    def __init__(
        self, *workers: InstanceRecord, policy: str = "kv", limits: Limits | None = None, weights: Weights | None = None
    ) -> None:
        self.dispatcher = Dispatcher(
            "router-a", limits or Limits(), weights or Weights(), BUILT_IN[policy](), Random(7)
        )
        for record in workers:
            self.dispatcher.state.joined(record)

    def submit(
        self, ask: RouteRequest, matches: Sequence[Match] = (), *, deadline: float = LATER, now: float = 0.0
    ) -> Placed | Refused | Queued:
        outcome, settled = self.dispatcher.submit(ask, matches, deadline, now)
        self.dispatcher.check_integrity()
        assert not settled
        return outcome

    def place(self, ask: RouteRequest, matches: Sequence[Match] = (), *, now: float = 0.0) -> Placement:
        outcome = self.submit(ask, matches, now=now)
        assert isinstance(outcome, Placed)
        return outcome.placement

    def refuse(self, ask: RouteRequest, *, deadline: float = LATER, now: float = 0.0) -> ErrorCode:
        outcome = self.submit(ask, deadline=deadline, now=now)
        assert isinstance(outcome, Refused)
        return outcome.reply.code

    def pump(self, now: float) -> dict[str, str]:
        settled = self.dispatcher.pump(now)
        self.dispatcher.check_integrity()
        return dict(map(_shown, settled))


def _shown(settled: Settled) -> tuple[str, str]:
    match settled.outcome:
        case Placed(placement=placement):
            return settled.request_id, placement.worker_id
        case Refused(reply=reply):
            return settled.request_id, reply.code


def test_the_worker_that_holds_the_prefix_gets_the_request() -> None:
    router = Router(worker_record("w1"), worker_record("w2"))
    keys = chain(1, 2, 3, 4)
    placement = router.place(request(keys=keys, prompt_tokens=70, explain=True), [g1("w2", 4)])
    assert (placement.worker_id, placement.cached_tokens, placement.onboard_tokens) == ("w2", 64, 0)
    assert placement.policy == "kv"
    assert placement.explanation is not None
    assert [terms.worker_id for terms in placement.explanation.workers] == ["w2", "w1"]


def test_load_outweighs_a_short_prefix() -> None:
    router = Router(worker_record("w1"), worker_record("w2"))
    router.dispatcher.state.load_report(report("w2", running=3, waiting_tokens=5000), 0.0)
    assert router.place(request(keys=chain(1), prompt_tokens=1000), [g1("w2", 1)]).worker_id == "w1"


def test_a_faster_worker_wins_when_nothing_is_cached() -> None:
    router = Router(worker_record("slow", rate=100.0), worker_record("fast", rate=1000.0))
    assert router.place(request()).worker_id == "fast"


def test_the_last_prompt_token_is_never_cached() -> None:
    router = Router(worker_record("w1"))
    placement = router.place(request(keys=chain(1, 2), prompt_tokens=32), [g1("w1", 2)])
    assert placement.cached_tokens == 16


def test_equal_workers_are_chosen_by_chance() -> None:
    chosen: Counter[str] = Counter()
    router = Router(worker_record("w1"), worker_record("w2"))
    for number in range(40):
        chosen[router.place(request(f"r{number}")).worker_id] += 1
        router.dispatcher.finished(f"r{number}")
    assert min(chosen["w1"], chosen["w2"]) > 5


def test_reservations_spread_requests_before_any_report() -> None:
    router = Router(*(worker_record(f"w{i}") for i in range(4)))
    chosen = Counter(router.place(request(f"r{i}")).worker_id for i in range(8))
    assert set(chosen.values()) == {2}


def test_a_fan_out_of_equal_prompts_goes_to_the_worker_that_computes_the_prefix() -> None:
    router = Router(*(worker_record(f"w{i}", slots=16) for i in range(4)))
    keys = chain(*range(1, 101))
    first = router.place(request("lead", keys=keys, prompt_tokens=1610))
    others = [router.place(request(f"sub{i}", keys=keys, prompt_tokens=1610), now=0.1 * i) for i in range(5)]
    assert {placement.worker_id for placement in others} == {first.worker_id}
    assert all(placement.cached_tokens == 0 for placement in others), "nothing is promised that is not stored yet"


def test_a_fan_out_spreads_when_the_tails_are_longer_than_the_prefix() -> None:
    router = Router(*(worker_record(f"w{i}", slots=16) for i in range(4)))
    prefix = range(1, 11)
    for number in range(4):
        keys = chain(*prefix, *range(1000 * number + 1000, 1000 * number + 1100))
        router.place(request(f"r{number}", keys=keys, prompt_tokens=1770))
    active = [worker.totals.active for worker in router.dispatcher.state.workers(MODEL)]
    assert active == [1, 1, 1, 1]


def test_what_a_host_holds_in_a_lower_tier_counts_for_its_workers() -> None:
    router = Router(worker_record("w1", host="one"), worker_record("w2", host="two"), kvbm_record("two"))
    keys = chain(*range(1, 11))
    match = Match(instance_id="kvbm-two", tier="g2", depth=10)
    placement = router.place(request(keys=keys, prompt_tokens=170), [match, g1("w2", 4)])
    assert (placement.worker_id, placement.cached_tokens, placement.onboard_tokens) == ("w2", 64, 96)


def test_onboarding_that_takes_longer_than_computing_is_not_counted_on() -> None:
    slow = kvbm_record("h", bytes_per_s=1000.0)
    router = Router(worker_record("w1", block_bytes=16_000), slow)
    match = Match(instance_id="kvbm-h", tier="g2", depth=10)
    assert router.place(request(keys=chain(*range(1, 11)), prompt_tokens=170), [match]).onboard_tokens == 0
    router.dispatcher.finished("r")
    fast = kvbm_record("h", bytes_per_s=1e9)
    router.dispatcher.state.joined(fast)
    assert router.place(request("s", keys=chain(*range(1, 11)), prompt_tokens=170), [match]).onboard_tokens == 160


def test_constraints_are_honoured() -> None:
    router = Router(*(worker_record(f"w{i}") for i in range(3)))
    matches = [g1("w0", 4)]
    keys = chain(1, 2, 3, 4)
    assert router.place(request("a", keys=keys, excluded=["w0", "w1"]), matches).worker_id == "w2"
    assert router.place(request("b", keys=keys, allowed=["w1"]), matches).worker_id == "w1"
    assert router.place(request("c", keys=keys, pinned="w1"), matches).worker_id == "w1"


def test_draining_and_prefill_only_workers_get_nothing() -> None:
    router = Router(worker_record("w1", draining=True), worker_record("w2", role="prefill"), worker_record("w3"))
    assert router.place(request("a")).worker_id == "w3"
    router.dispatcher.state.load_report(msgspec.structs.replace(report("w3"), draining=True), 0.0)
    assert isinstance(router.submit(request("b")), Queued)


def test_a_request_bound_to_a_worker_that_is_gone_is_refused_at_once() -> None:
    router = Router(worker_record("w1"))
    assert router.refuse(request(pinned="w9")) is ErrorCode.NO_WORKERS
    for number in range(5):
        router.place(request(f"r{number}"))
    assert isinstance(router.submit(request("waits", pinned="w1")), Queued)
    router.dispatcher.state.left(worker_record("w1"))
    assert router.pump(0.0) == {"waits": ErrorCode.NO_WORKERS}


def test_only_when_every_worker_is_full_does_a_request_wait() -> None:
    router = Router(worker_record("w1"), worker_record("w2"), limits=Limits(max_requests_per_worker=2))
    for number in range(4):
        router.place(request(f"r{number}"))
    assert isinstance(router.submit(request("waits"), now=1.0), Queued)
    assert router.pump(2.0) == {}
    assert router.dispatcher.finished("r0")
    outcome = router.dispatcher.pump(3.0)[0].outcome
    assert isinstance(outcome, Placed)
    assert outcome.placement.queued_s == 2.0


def test_the_limit_of_a_worker_follows_its_slots() -> None:
    router = Router(worker_record("w1", slots=4), limits=Limits(worker_limit_factor=1.5))
    for number in range(6):
        router.place(request(f"r{number}"))
    assert isinstance(router.submit(request("seventh")), Queued)


def test_nobody_overtakes_those_who_wait_except_by_priority() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1))
    router.place(request("r"))
    for number, (priority, strict) in enumerate([(0, 0), (5, 0), (0, 1)]):
        router.submit(request(f"q{number}", priority=priority, strict=strict))
    router.dispatcher.finished("r")
    outcome, settled = router.dispatcher.submit(request("new"), (), LATER, 0.0)
    assert isinstance(outcome, Queued)
    assert dict(map(_shown, settled)) == {"q2": "w1"}
    for expected, done in [("q1", "q2"), ("q0", "q1"), ("new", "q0")]:
        router.dispatcher.finished(done)
        assert router.pump(0.0) == {expected: "w1"}


def test_a_request_that_only_a_full_worker_may_take_does_not_block_the_others() -> None:
    router = Router(worker_record("w1"), worker_record("w2"), limits=Limits(max_requests_per_worker=1))
    router.place(request("r1", pinned="w1"))
    assert isinstance(router.submit(request("bound", pinned="w1", strict=9)), Queued)
    assert router.place(request("free")).worker_id == "w2"


def test_a_full_queue_is_overload_with_a_time_to_come_back() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1, max_queued=2))
    router.place(request("r"))
    router.submit(request("q1"))
    router.submit(request("q2"))
    outcome = router.submit(request("q3"))
    assert isinstance(outcome, Refused)
    assert outcome.reply.code is ErrorCode.OVERLOADED
    assert outcome.reply.retryable
    assert outcome.reply.retry_after_s is not None
    assert outcome.reply.retry_after_s >= 1.0


def test_the_time_to_come_back_grows_with_the_queue_and_its_pace() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1, max_queued=3))
    router.place(request("q0"))
    router.submit(request("q1"))
    for number in range(30):
        router.submit(request(f"q{number + 2}"), now=10.0 * number)
        router.dispatcher.finished(f"q{number}")
        assert router.pump(10.0 * number) == {f"q{number + 1}": "w1"}
    for number in range(2):
        router.submit(request(f"z{number}"), now=300.0)
    outcome = router.submit(request("too many"), now=300.0)
    assert isinstance(outcome, Refused)
    assert outcome.reply.retry_after_s is not None
    assert 20.0 < outcome.reply.retry_after_s <= 60.0


def test_too_many_placed_requests_are_overload_too() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_reservations=1))
    router.place(request("r"))
    assert router.refuse(request("s")) is ErrorCode.OVERLOADED


def test_a_deadline_ends_the_wait() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1))
    router.place(request("r"))
    assert router.refuse(request("late"), deadline=5.0, now=5.0) is ErrorCode.DEADLINE_EXCEEDED
    assert isinstance(router.submit(request("q"), deadline=9.0, now=5.0), Queued)
    assert router.dispatcher.next_due() == 9.0
    assert router.pump(8.9) == {}
    assert router.pump(9.0) == {"q": ErrorCode.DEADLINE_EXCEEDED}
    assert router.dispatcher.next_due() is None


def test_without_any_worker_a_request_waits_a_moment_for_one() -> None:
    router = Router(limits=Limits(worker_wait_s=2.0))
    assert isinstance(router.submit(request("a")), Queued)
    assert router.dispatcher.next_due() == 2.0
    router.dispatcher.state.joined(worker_record("w1"))
    assert router.pump(1.0) == {"a": "w1"}


def test_when_all_workers_vanish_those_who_wait_are_sent_away_after_a_moment() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1, worker_wait_s=2.0))
    router.place(request("r"))
    router.submit(request("q"), now=0.0)
    router.dispatcher.state.left(worker_record("w1"))
    assert router.pump(10.0) == {}
    assert router.dispatcher.next_due() == 12.0
    (settled,) = router.dispatcher.pump(12.0)
    assert isinstance(settled.outcome, Refused)
    assert settled.outcome.reply.code is ErrorCode.NO_WORKERS
    assert settled.outcome.reply.retryable


def test_a_worker_that_comes_back_in_time_ends_the_countdown() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1, worker_wait_s=2.0))
    router.place(request("r"))
    router.submit(request("q"))
    router.dispatcher.state.left(worker_record("w1"))
    router.pump(1.0)
    router.dispatcher.state.joined(worker_record("w1", incarnation=2))
    assert router.pump(2.0) == {"q": "w1"}


def test_asking_again_moves_the_reservation_and_a_waiting_first_try_is_ended() -> None:
    router = Router(worker_record("w1"), worker_record("w2"), limits=Limits(max_requests_per_worker=1))
    first = router.place(request("r"))
    second = router.place(request("r", excluded=[first.worker_id]))
    assert second.worker_id != first.worker_id
    assert router.dispatcher.state.reservations == 1
    router.place(request("s"))
    assert isinstance(router.submit(request("q")), Queued)
    outcome, settled = router.dispatcher.submit(request("q"), (), LATER, 0.0)
    assert isinstance(outcome, Queued)
    assert dict(map(_shown, settled)) == {"q": ErrorCode.CANCELLED}


def test_a_client_that_goes_away_leaves_the_queue() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1))
    router.place(request("r"))
    router.submit(request("q"))
    assert router.dispatcher.is_waiting("q")
    assert dict(map(_shown, router.dispatcher.leave_queue("q", "gone"))) == {"q": ErrorCode.CANCELLED}
    assert router.dispatcher.leave_queue("q", "gone") == []
    assert not router.dispatcher.is_waiting("q")
    assert router.dispatcher.waiting == 0
    router.dispatcher.check_integrity()


def test_a_router_that_stops_sends_everybody_who_waits_elsewhere() -> None:
    router = Router(worker_record("w1"), limits=Limits(max_requests_per_worker=1))
    router.place(request("r"))
    router.submit(request("q"))
    settled = router.dispatcher.refuse_all(ErrorCode.DRAINING, "stopping")
    assert dict(map(_shown, settled)) == {"q": ErrorCode.DRAINING}
    assert router.dispatcher.waiting == 0


def test_a_decision_makes_the_same_reservation_at_a_replica() -> None:
    one = Router(worker_record("w1"), worker_record("w2"))
    other = Router(worker_record("w1"), worker_record("w2"))
    keys = chain(1, 2, 3)
    outcome = one.submit(request("r", keys=keys, prompt_tokens=50))
    assert isinstance(outcome, Placed)
    assert other.dispatcher.state.apply_decision(outcome.decision, 0.0)
    for worker_id in ("w1", "w2"):
        here, there = one.dispatcher.state.worker(worker_id), other.dispatcher.state.worker(worker_id)
        assert here is not None
        assert there is not None
        assert here.totals == there.totals
    follow_up = other.place(request("s", keys=keys, prompt_tokens=50))
    assert follow_up.worker_id == outcome.placement.worker_id


def test_round_robin_takes_turns_and_skips_who_may_not() -> None:
    router = Router(*(worker_record(f"w{i}") for i in range(3)), policy="round-robin")
    chosen = [router.place(request(f"r{i}"), [g1("w0", 6)]).worker_id for i in range(4)]
    assert chosen == ["w0", "w1", "w2", "w0"]
    assert router.place(request("x", excluded=["w1"])).worker_id == "w2"


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two"])
def test_load_policies_prefer_the_idle_worker(policy: str) -> None:
    router = Router(worker_record("w1"), worker_record("w2"), policy=policy)
    router.dispatcher.state.load_report(report("w1", running=3), 0.0)
    assert router.place(request(), [g1("w1", 6)]).worker_id == "w2"


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_every_policy_places_on_a_single_worker(policy: str) -> None:
    router = Router(worker_record("w1"), policy=policy)
    placement = router.place(request())
    assert (placement.worker_id, placement.policy) == ("w1", policy)


def test_random_reaches_everybody() -> None:
    router = Router(*(worker_record(f"w{i}", slots=100) for i in range(3)), policy="random")
    assert {router.place(request(f"r{i}")).worker_id for i in range(60)} == {"w0", "w1", "w2"}
