import pytest

from kvbus_router.core.fairness import LEAST_TURN_TOKENS, OTHERS, FlowKey, RoundRobin
from kvbus_router.core.queue import OVERDUE_TURN, WaitingQueue


def _flow(tenant: str) -> FlowKey:
    return FlowKey("", tenant)


def _queue(**limits: int) -> WaitingQueue[str]:
    return WaitingQueue(1000, 0.1, 30.0, **limits)


def _add(
    queue: WaitingQueue[str], name: str, tenant: str, *, strict: int = 0, priority: int = 0, weight: float = 1.0
) -> None:
    queue.add(name, name, strict_priority=strict, priority=priority, now=0.0, flow=_flow(tenant), weight=weight)


def _serve(queue: WaitingQueue[str], tokens: int) -> str:
    name = next(queue.in_order(0.0)).item
    queue.take_turn(name, tokens)
    queue.check_integrity()
    return name


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few() -> None:
    queue = _queue(quantum_tokens=100)
    for number in range(20):
        _add(queue, f"hog{number}", "hog")
    _add(queue, "guest", "guest")
    assert [_serve(queue, 100) for _ in range(3)] == ["hog0", "guest", "hog1"]


def test_who_has_had_a_large_turn_waits_until_others_had_as_much() -> None:
    queue = _queue(quantum_tokens=100)
    for number in range(20):
        _add(queue, f"large{number}", "large")
        _add(queue, f"small{number}", "small")
    served = [_serve(queue, 1000 if queue_turn_is_large else 100) for queue_turn_is_large in [True, *([False] * 11)]]
    assert served[0] == "large0"
    assert served[1:11] == [f"small{number}" for number in range(10)]


def test_priority_of_one_tenant_is_nothing_to_another_but_a_strict_tier_is() -> None:
    queue = _queue(quantum_tokens=100)
    _add(queue, "a", "a")
    _add(queue, "b", "b")
    _add(queue, "b urgent", "b", priority=50)
    _add(queue, "c strict", "c", strict=1)
    assert [_serve(queue, 100) for _ in range(4)] == ["c strict", "a", "b urgent", "b"]


def test_a_debt_is_remembered_while_others_wait_though_the_tenant_does_not() -> None:
    queue = _queue(quantum_tokens=100)
    for number in range(30):
        _add(queue, f"b{number}", "b")
    _add(queue, "a0", "a")
    assert [_serve(queue, 100), _serve(queue, 1000)] == ["b0", "a0"]
    _add(queue, "a1", "a")
    served = [_serve(queue, 100) for _ in range(11)]
    assert "a1" not in served[:9]
    assert "a1" in served


def test_a_turn_that_computes_nothing_costs_a_little() -> None:
    robin = RoundRobin(LEAST_TURN_TOKENS, 10)
    a, b = robin.join(_flow("a"), 1.0), robin.join(_flow("b"), 1.0)
    assert robin.order([a, b]) == [a, b]
    robin.charge(a, 0)
    assert robin.order([a, b]) == [b, a]


def test_what_cannot_be_used_is_not_saved_beyond_a_round() -> None:
    robin = RoundRobin(100, 10)
    stuck, busy = robin.join(_flow("stuck"), 1.0), robin.join(_flow("busy"), 1.0)
    for _ in range(50):
        robin.charge(busy, 100)
        robin.check_integrity({stuck: 1, busy: 1})
    robin.charge(stuck, 100)
    assert robin.order([busy, stuck]) == [busy, stuck]


def test_tenants_beyond_the_limit_share_one_flow() -> None:
    robin = RoundRobin(100, 2)
    assert [robin.join(_flow(name), 1.0).tenant for name in "abcd"] == ["a", "b", OTHERS, OTHERS]
    assert robin.join(_flow("a"), 1.0).tenant == "a"
    robin.check_integrity({_flow("a"): 2, _flow("b"): 1, _flow(OTHERS): 2})
    for _ in range(2):
        robin.leave(_flow("a"))
    assert robin.join(_flow("e"), 1.0).tenant == "e"


def test_room_for_a_tenant_is_made_by_forgetting_the_least_debt_of_one_that_does_not_wait() -> None:
    robin = RoundRobin(100, 2)
    for name, tokens in (("a", 500), ("b", 300)):
        robin.charge(robin.join(_flow(name), 1.0), tokens)
        robin.leave(_flow(name))
    c = robin.join(_flow("c"), 1.0)
    a = robin.join(_flow("a"), 1.0)
    assert (a.tenant, c.tenant) == ("a", "c")
    assert robin.order([a, c]) == [c, a]
    assert robin.join(_flow("b"), 1.0).tenant == OTHERS


def test_an_overdue_request_that_no_worker_can_take_holds_up_no_other_overdue_one() -> None:
    """The one that came first may be bound to a worker that is full: the turn is the next one's."""
    queue: WaitingQueue[str] = WaitingQueue(100, 0.1, 10.0)
    queue.add("bound", "bound", strict_priority=0, priority=0, now=0.0)
    queue.add("meek", "meek", strict_priority=0, priority=0, now=1.0)
    for number in range(OVERDUE_TURN):
        queue.add(f"strict{number}", f"strict{number}", strict_priority=1, priority=0, now=100.0)
    served = []
    for _ in range(OVERDUE_TURN):
        name = next(waiting.item for waiting in queue.in_order(100.0) if waiting.item != "bound")
        queue.take_turn(name)
        served.append(name)
    assert served[-1] == "meek"


def test_the_newest_weight_of_a_class_counts() -> None:
    queue = _queue(quantum_tokens=100)
    for number in range(10):
        _add(queue, f"a{number}", "a", weight=1.0)
        _add(queue, f"b{number}", "b", weight=1.0)
    _add(queue, "a last", "a", weight=3.0)
    served = [_serve(queue, 100) for _ in range(8)]
    assert sum(name.startswith("a") for name in served) == pytest.approx(6, abs=1)


def test_a_tenant_keeps_no_more_than_its_new_weight_brings() -> None:
    robin = RoundRobin(100, 10)
    stuck, busy = robin.join(_flow("stuck"), 9.0), robin.join(_flow("busy"), 1.0)
    robin.charge(busy, 500)
    robin.charge(busy, 500)
    robin.join(_flow("stuck"), 1.0)
    robin.check_integrity({stuck: 2, busy: 1})
