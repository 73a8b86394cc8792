"""Limits of policy classes where several routers place."""

from math import inf
from random import Random

import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_router.core.policy_classes import read_classes
from kvbus_router.core.turns import LEAD_S, Turns
from kvbus_testkit.routing import request, worker_record
from kvbus_wire.router import Decision

LATER = 1e6
HEARD_S = LEAD_S / 5
"""How long a decision takes to the other routers."""
FLOW = FlowKey("batch", "a")


class Replicas:
    """``running``: requests that are placed, by the router that has placed them."""

    def __init__(self, limits: str, count: int) -> None:
        names = [f"router-{number}" for number in range(count)]
        classes = read_classes(f'[[class]]\nname = "batch"\ntenants = ["batch"]\n{limits}'.encode())
        self.routers = {
            name: Dispatcher(name, Limits(), Weights(), KvPolicy(), Random(1), classes=classes) for name in names
        }
        for router in self.routers.values():
            router.set_routers(names)
            for worker in ("w1", "w2", "w3"):
                router.state.joined(worker_record(worker))
        self.now = 0.0
        self.running: dict[str, str] = {}
        self._news: list[tuple[float, str, Decision]] = []

    def submit(self, router: str, request_id: str) -> None:
        outcome, settled = self.routers[router].submit(request(request_id, tenant="batch"), (), LATER, self.now)
        assert not settled
        if isinstance(outcome, Placed):
            self._placed(router, outcome)

    def finish(self, request_id: str) -> None:
        """All routers hear of it at the same moment."""
        del self.running[request_id]
        for router in self.routers.values():
            router.finished(request_id)
        self._pump()

    def step(self) -> None:
        self.now += HEARD_S
        due, self._news = [n for n in self._news if n[0] <= self.now], [n for n in self._news if n[0] > self.now]
        for _, name, decision in due:
            self.routers[name].apply_decision(decision, self.now)
        self._pump()

    def _pump(self) -> None:
        for name, router in self.routers.items():
            for settled in router.pump(self.now):
                assert isinstance(settled.outcome, Placed)
                self._placed(name, settled.outcome)
            router.check_integrity()

    def _placed(self, by: str, placed: Placed) -> None:
        self.running[placed.placement.request_id] = by
        self._news += [(self.now + HEARD_S, name, placed.decision) for name in self.routers if name != by]


@pytest.mark.parametrize("limits", ["max_running = 2", "max_running_per_tenant = 2"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_place_that_becomes_free_is_used_once_however_many_routers_have_somebody_waiting(
    limits: str, count: int
) -> None:
    replicas = Replicas(limits, count)
    for number in range(60):
        replicas.submit(f"router-{number % count}", f"r{number}")
        replicas.step()
    served: list[str] = []
    while replicas.running:
        assert len(replicas.running) <= 2
        ended = next(iter(replicas.running))
        served.append(replicas.running[ended])
        replicas.finish(ended)
        assert len(replicas.running) <= 2
        for _ in range(5 * count):
            replicas.step()
    assert len(served) == 60
    first = served[: 60 // 2]
    assert all(first.count(router) > 60 / 2 / count / 3 for router in replicas.routers), "all get their turns"


def test_a_place_that_its_router_does_not_want_goes_to_the_next() -> None:
    replicas = Replicas("max_running = 1", 2)
    for number in range(10):
        replicas.submit("router-0", f"r{number}")
    waits = []
    while replicas.running:
        begun = replicas.now
        replicas.finish(next(iter(replicas.running)))
        while not replicas.running and replicas.routers["router-0"].waiting:
            replicas.step()
        waits.append(replicas.now - begun)
    assert len(waits) == 10
    assert max(waits) <= LEAD_S + HEARD_S
    assert min(waits) == 0


def test_a_lone_router_has_every_turn() -> None:
    turns = Turns("a")
    turns.ended("r", FLOW, 0.0)
    assert (turns.of_class("batch"), turns.of_flow(FLOW), turns.due) == (0, 0, inf)


def test_a_place_counts_as_taken_until_it_is_the_routers_turn() -> None:
    circle = [Turns(name) for name in "abc"]
    for turns in circle:
        turns.set_routers("abc")
        turns.ended("r", FLOW, 1.0)
    assert sorted(turns.due for turns in circle) == [1.0 + LEAD_S, 1.0 + 2 * LEAD_S, inf]
    assert [turns.of_class("batch") for turns in circle].count(1) == 2
    for turns in circle:
        turns.advance(1.0 + LEAD_S)
    assert [turns.of_flow(FLOW) for turns in circle].count(1) == 1


def test_a_router_is_woken_when_its_turn_comes() -> None:
    replicas = Replicas("max_running = 1", 2)
    for number in range(12):
        replicas.submit("router-0", f"r{number}")
    router = replicas.routers["router-0"]
    while replicas.running:
        replicas.finish(next(iter(replicas.running)))
    assert router.waiting
    due = router.next_due()
    assert due is not None
    assert replicas.now < due <= replicas.now + LEAD_S
