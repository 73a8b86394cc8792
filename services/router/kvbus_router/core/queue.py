"""The order in which requests wait.

First by ``strict_priority``, then by priority plus what waiting is worth (``aging_per_s``), then first come, first served. All
wait at the same speed, so two requests never change places and the order is known on arrival:

    priority + (now - arrived) * aging   is ordered as   priority - arrived * aging

Strict tiers alone could starve those below for ever. So every fourth turn belongs to the one that has waited longest, once that is
more than ``overdue_s``.
"""

from bisect import insort
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

OVERDUE_TURN = 4


class Waiting(Generic[T]):
    """One place in the queue."""

    __slots__ = ("arrived_at", "item", "number", "order")

    def __init__(self, item: T, number: int, arrived_at: float, strict: int, score: float) -> None:
        self.item = item
        self.number = number
        self.arrived_at = arrived_at
        self.order = (-strict, -score, number)

    def __lt__(self, other: "Waiting[T]") -> bool:
        return self.order < other.order


class WaitingQueue(Generic[T]):
    """Bounded; by request id."""

    def __init__(self, max_length: int, aging_per_s: float, overdue_s: float) -> None:
        self._max_length = max_length
        self._aging_per_s = aging_per_s
        self._overdue_s = overdue_s
        self._by_id: dict[str, Waiting[T]] = {}
        self._ordered: list[Waiting[T]] = []
        self._number = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def can_add(self) -> bool:
        return len(self._by_id) < self._max_length

    def add(self, request_id: str, item: T, *, strict_priority: int, priority: int, now: float) -> None:
        """Raise KeyError when the request waits already, OverflowError when the queue is full."""
        if request_id in self._by_id:
            raise KeyError(request_id)
        if not self.can_add():
            raise OverflowError
        self._number += 1
        score = priority - now * self._aging_per_s
        waiting = Waiting(item, self._number, now, strict_priority, score)
        self._by_id[request_id] = waiting
        insort(self._ordered, waiting)

    def remove(self, request_id: str) -> T | None:
        """The request waits no more, whatever the reason."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        self._ordered.remove(waiting)
        return waiting.item

    def take_turn(self, request_id: str) -> T | None:
        """`remove` because the request is served."""
        self._turn += 1
        return self.remove(request_id)

    def in_order(self, now: float) -> Iterator[Waiting[T]]:
        """Who is next, then who is next if that one cannot be served, and so on. Do not change the queue while iterating."""
        overdue = self._overdue(now)
        if overdue is not None:
            yield overdue
        for waiting in self._ordered:
            if waiting is not overdue:
                yield waiting

    def items(self) -> list[T]:
        return [waiting.item for waiting in self._ordered]

    def _overdue(self, now: float) -> Waiting[T] | None:
        if self._turn % OVERDUE_TURN != OVERDUE_TURN - 1 or not self._by_id:
            return None
        # The dict is in the order of arrival.
        oldest = next(iter(self._by_id.values()))
        return oldest if now - oldest.arrived_at > self._overdue_s else None

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        if sorted(self._ordered) != self._ordered or set(self._ordered) != set(self._by_id.values()):
            raise AssertionError("the queue is out of order")
        if len(self._by_id) > self._max_length:
            raise AssertionError("the queue is too long")
