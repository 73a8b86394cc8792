"""What the queue promises whatever comes: nobody waits beyond the bound, and tenants get their shares."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbus_router.core.fairness import LEAST_TURN_TOKENS, FlowKey
from kvbus_router.core.queue import OVERDUE_TURN, WaitingQueue

OVERDUE_S, AGING, QUANTUM = 5.0, 0.5, 100
TURN_S = 1.0

hints = st.tuples(st.integers(0, 3), st.integers(-50, 50), st.sampled_from("abc"))
arrivals = st.lists(st.lists(hints, max_size=4), max_size=30)
costs = st.lists(st.integers(0, 2000), min_size=1, max_size=20)


@given(arrivals, costs)
def test_nobody_waits_longer_than_the_bound_whatever_comes_later(
    script: list[list[tuple[int, int, str]]], tokens: list[int]
) -> None:
    """A turn a second; a request that is overdue has every fourth turn to share with those that came before it."""
    queue: WaitingQueue[float] = WaitingQueue(1000, AGING, OVERDUE_S, quantum_tokens=QUANTUM, max_tenants=2)
    latest: dict[str, float] = {}
    now, number = 0.0, 0
    while script or queue:
        for strict, priority, tenant in script.pop(0) if script else ():
            number += 1
            name = str(number)
            turns = OVERDUE_TURN * (len(queue) + 1) + 1
            latest[name] = now + OVERDUE_S + turns * TURN_S
            queue.add(
                name, now, strict_priority=strict, priority=priority, now=now, flow=FlowKey("", tenant), weight=1.0
            )
        queue.check_integrity()
        chosen = next(queue.in_order(now), None)
        if chosen is not None:
            assert now <= latest[str(chosen.number)]
            queue.take_turn(str(chosen.number), tokens[chosen.number % len(tokens)])
        now += TURN_S
    queue.check_integrity()


@given(st.lists(st.tuples(st.integers(-20, 20), st.floats(0, 3)), min_size=1, max_size=40))
def test_priority_gives_a_lead_that_waiting_makes_up_for(script: list[tuple[int, float]]) -> None:
    """Of one tenant: nobody is overtaken by what came later than its lead in priority is worth."""
    queue: WaitingQueue[tuple[int, float]] = WaitingQueue(100, AGING, overdue_s=1e9)
    now = 0.0
    for number, (priority, pause) in enumerate(script):
        now += pause
        queue.add(str(number), (priority, now), strict_priority=0, priority=priority, now=now)
    order = [waiting.item for waiting in queue.in_order(now)]
    for place, (priority, arrived) in enumerate(order):
        for later_priority, later_arrived in order[:place]:
            assert later_arrived <= arrived + (later_priority - priority) / AGING + 1e-6


@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=4),
    st.lists(st.integers(0, 500), min_size=1, max_size=30),
    st.integers(1, 150),
)
def test_tenants_that_always_wait_get_tokens_by_their_weights(
    weights: list[float], tokens: list[int], turns: int
) -> None:
    queue: WaitingQueue[int] = WaitingQueue(1000, AGING, overdue_s=1e9, quantum_tokens=QUANTUM)
    number = 0

    def come(tenant: int) -> None:
        nonlocal number
        number += 1
        flow = FlowKey("", str(tenant))
        queue.add(str(number), tenant, strict_priority=0, priority=0, now=0.0, flow=flow, weight=weights[tenant])

    for tenant in (*range(len(weights)), *range(len(weights))):
        come(tenant)
    served: Counter[int] = Counter()
    for turn in range(turns):
        chosen = next(queue.in_order(0.0))
        cost = tokens[(turn * 7 + chosen.item) % len(tokens)]
        queue.take_turn(str(chosen.number), cost)
        served[chosen.item] += max(cost, LEAST_TURN_TOKENS)
        come(chosen.item)
        queue.check_integrity()
    shares = [served[tenant] / weight for tenant, weight in enumerate(weights)]
    assert max(shares) - min(shares) <= 2 * QUANTUM + max(500, LEAST_TURN_TOKENS) / min(weights)
