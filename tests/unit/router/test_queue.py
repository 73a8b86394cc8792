import pytest

from kvbus_router.core.queue import WaitingQueue


def _queue(max_length: int = 100, aging_per_s: float = 0.1, overdue_s: float = 30.0) -> WaitingQueue[str]:
    return WaitingQueue(max_length, aging_per_s, overdue_s)


def _add(queue: WaitingQueue[str], name: str, *, strict: int = 0, priority: int = 0, now: float = 0.0) -> None:
    queue.add(name, name, strict_priority=strict, priority=priority, now=now)


def _order(queue: WaitingQueue[str], now: float = 0.0) -> list[str]:
    queue.check_integrity()
    return [waiting.item for waiting in queue.in_order(now)]


def test_the_order_is_strict_priority_then_priority_then_arrival() -> None:
    queue = _queue()
    _add(queue, "first")
    _add(queue, "second")
    _add(queue, "urgent", priority=5)
    _add(queue, "strict", strict=1, priority=-5)
    assert _order(queue) == ["strict", "urgent", "first", "second"]


def test_waiting_makes_up_for_priority() -> None:
    queue = _queue(aging_per_s=0.1)
    _add(queue, "patient", now=0.0)
    _add(queue, "soon", priority=1, now=9.9)
    _add(queue, "late", priority=1, now=10.1)
    assert _order(queue) == ["soon", "patient", "late"]


def test_even_a_flood_of_strict_requests_starves_nobody() -> None:
    queue = _queue(overdue_s=10.0)
    _add(queue, "meek", now=0.0)
    served: list[str] = []
    now = 0.0
    while "meek" not in served:
        now += 1.0
        _add(queue, f"flood{now:g}a", strict=9, now=now)
        _add(queue, f"flood{now:g}b", strict=9, now=now)
        name = _order(queue, now)[0]
        assert queue.take_turn(name) == name
        served.append(name)
        assert now < 20.0
    assert now > 10.0


def test_overdue_requests_get_only_some_of_the_turns() -> None:
    queue = _queue(overdue_s=10.0)
    for number in range(10):
        _add(queue, f"meek{number}", now=0.0)
    for number in range(10):
        _add(queue, f"strict{number}", strict=1, now=100.0)
    served = []
    for _ in range(8):
        name = _order(queue, 100.0)[0]
        queue.take_turn(name)
        served.append(name)
    assert [name for name in served if name.startswith("meek")] == ["meek0", "meek1"]


def test_a_full_queue_says_so() -> None:
    queue = _queue(max_length=2)
    _add(queue, "a")
    assert queue.can_add()
    _add(queue, "b")
    assert not queue.can_add()
    with pytest.raises(OverflowError):
        _add(queue, "c")
    assert queue.remove("a") == "a"
    assert queue.remove("a") is None
    _add(queue, "c")
    assert len(queue) == 2
    with pytest.raises(KeyError):
        _add(queue, "b")
