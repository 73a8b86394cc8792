"""What a look through the queue costs, and that what it leaves out is made up for."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_router.core.scheduling import LOOK_S
from kvbus_testkit.routing import chain, report, request, worker_record
from kvbus_wire.errors import ErrorCode
from kvbus_wire.request import AgentHints
from kvbus_wire.router import RouteRequest

LATER = 1e6
BLOCKS = 500
PREFIX = chain(*range(1, BLOCKS + 1))


class CountingPolicy(KvPolicy):
    """``asked``: for how many requests the workers were weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        self.asked += 1
        return super().choose(estimates, rng)


class Cluster:
    """Workers with one slot each."""

    def __init__(self, *workers: str, **limits: Any) -> None:
        self.policy = CountingPolicy()
        self.dispatcher = Dispatcher(
            "router", Limits(max_requests_per_worker=1, **limits), Weights(), self.policy, Random(3)
        )
        for worker in workers:
            self.dispatcher.state.joined(worker_record(worker, slots=1))

    def submit(self, ask: RouteRequest, now: float = 0.0) -> str:
        """Who got it; "" when it waits, or the code of its refusal."""
        outcome, _ = self.dispatcher.submit(ask, (), LATER, now)
        self.dispatcher.check_integrity()
        match outcome:
            case Placed(placement=placement):
                return placement.worker_id
            case Refused(reply=reply):
                return reply.code
            case Queued():
                return ""

    def pump(self, now: float) -> dict[str, str]:
        settled = self.dispatcher.pump(now)
        self.dispatcher.check_integrity()
        return {
            s.request_id: s.outcome.placement.worker_id if isinstance(s.outcome, Placed) else s.outcome.reply.code
            for s in settled
        }


def agent(name: str) -> RouteRequest:
    """One of a fan-out: eight seconds of prefill, short output."""
    return msgspec.structs.replace(
        request(name, keys=PREFIX, prompt_tokens=BLOCKS * 16 + 10), hints=AgentHints(osl=10), max_tokens=1000
    )


def test_of_many_that_wait_for_a_full_worker_one_at_a_time_is_weighed_anew() -> None:
    cluster = Cluster("w1", "w2")
    assert cluster.submit(agent("leader"))
    followers = [f"follower{number}" for number in range(8)]
    assert [cluster.submit(agent(name)) for name in followers] == [""] * 8
    before = cluster.policy.asked
    for _ in range(100):
        assert cluster.pump(1.0) == {}
    assert cluster.policy.asked == before + 1
    for look in range(1, 8):
        assert cluster.pump(1.0 + look * LOOK_S) == {}
    assert cluster.policy.asked == before + 8


def test_who_waits_for_a_full_worker_goes_elsewhere_when_that_has_become_better() -> None:
    cluster = Cluster("w1", "w2", "w3")
    leader = cluster.submit(agent("leader"))
    assert [cluster.submit(agent(name)) for name in ("a", "b")] == ["", ""]
    # The worker has a hundred seconds of prefill before it: waiting for it is not worth while any more.
    cluster.dispatcher.load_report(report(leader, running=1, waiting_tokens=100_000, ids=["leader"]), 1.0)
    placed = cluster.pump(1.0)
    assert list(placed) == ["a"]
    assert placed["a"] != leader
    waiting = {item.id: item.waits_for for item in cluster.dispatcher.room.items()}
    assert waiting == {"b": leader}
    cluster.pump(1.0 + LOOK_S)
    waiting = {item.id: item.waits_for for item in cluster.dispatcher.room.items()}
    assert waiting == {"b": placed["a"]}, "that one computes the prefix as well, and sooner"


def test_who_waits_for_the_worker_of_its_session_is_served_when_that_has_room() -> None:
    cluster = Cluster("w1", "w2", affinity="hard")
    worker = cluster.submit(request("first", session="s"))
    assert cluster.submit(request("second", session="s")) == ""
    before = cluster.policy.asked
    for _ in range(100):
        assert cluster.pump(1.0) == {}
    assert cluster.policy.asked == before
    cluster.dispatcher.finished("first")
    assert cluster.pump(1.0) == {"second": worker}


@pytest.mark.parametrize("how", ["gone", "cordoned", "drains"])
def test_who_waits_for_the_worker_of_its_session_goes_elsewhere_when_that_takes_no_more(how: str) -> None:
    cluster = Cluster("w1", "w2", affinity="hard")
    worker = cluster.submit(request("first", session="s"))
    assert cluster.submit(request("second", session="s")) == ""
    cluster.pump(1.0)
    match how:
        case "gone":
            cluster.dispatcher.state.left(worker_record(worker))
        case "cordoned":
            cluster.dispatcher.set_thresholds(Thresholds(max_requests_per_worker=1, cordoned=(worker,)))
        case _:
            told = report(worker, running=1, ids=["first"])
            cluster.dispatcher.load_report(msgspec.structs.replace(told, draining=True), 1.0)
    assert cluster.pump(1.0) == {"second": "w2" if worker == "w1" else "w1"}


def test_a_request_of_a_hard_session_that_may_not_wait_leaves_nothing_behind() -> None:
    cluster = Cluster("w1", "w2", affinity="hard", max_queued=1)
    cluster.submit(request("first", session="s"))
    assert cluster.submit(request("guess", session="s", speculative=True)) == ErrorCode.OVERLOADED
    assert cluster.submit(request("second", session="s")) == ""
    assert cluster.submit(request("third", session="s")) == ErrorCode.OVERLOADED


def test_times_and_constraints_are_gone_through_only_when_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("w1")
    cluster.submit(request("runs"))
    for number in range(20):
        assert cluster.submit(request(f"q{number}")) == ""
    asked, may_run = 0, cluster.dispatcher._chooser.may_run

    def counted(ask: RouteRequest) -> bool:
        nonlocal asked
        asked += 1
        return may_run(ask)

    monkeypatch.setattr(cluster.dispatcher._chooser, "may_run", counted)
    for second in range(100):
        cluster.dispatcher.load_report(report("w1", running=1, ids=["runs"]), float(second))
        assert cluster.pump(float(second)) == {}
    assert asked == 0
    cluster.dispatcher.state.joined(worker_record("w1", slots=1, draining=True))
    assert cluster.pump(100.0) == {}
    assert asked == 1, "once for all, since they may all go to the same workers"
    assert cluster.dispatcher.next_due() == 102.0
    assert set(cluster.pump(102.0).values()) == {ErrorCode.NO_WORKERS}
    assert cluster.dispatcher.next_due() is None


def test_a_worker_that_says_in_its_report_that_it_drains_keeps_nobody_waiting() -> None:
    cluster = Cluster("w1", "w2")
    cluster.submit(request("runs", pinned="w1"))
    assert cluster.submit(request("bound", pinned="w1")) == ""
    told = report("w1", running=1, ids=["runs"])
    cluster.dispatcher.load_report(msgspec.structs.replace(told, draining=True), 1.0)
    assert cluster.pump(1.0) == {"bound": ErrorCode.NO_WORKERS}
