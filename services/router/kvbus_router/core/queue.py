"""The order in which requests wait.

    1. ``strict_priority``: a higher tier first
    2. within a tier, tenants by deficit round robin (`fairness`)
    3. of one tenant, by priority plus what waiting is worth (``aging_per_s``), then first come, first served

All wait at the same speed, so two requests of a tenant never change places and their order is known on arrival:

    priority + (now - arrived) * aging   is ordered as   priority - arrived * aging

Tiers, tenants and priorities could starve somebody for ever. So every fourth turn belongs to those who have waited more than
``overdue_s``, the one that came first before the others. That bounds all waiting: once a request is overdue, it is served within
`OVERDUE_TURN` turns for itself and for each of those that came before it (of those turns that a worker it may use can take).
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvbus_router.core.fairness import ONE_FLOW, FlowKey, RoundRobin

T = TypeVar("T")

OVERDUE_TURN = 4


class Waiting(Generic[T]):
    """One place in the queue."""

    __slots__ = ("arrived_at", "flow", "item", "number", "order", "strict")

    def __init__(self, item: T, number: int, arrived_at: float, flow: FlowKey, strict: int, score: float) -> None:
        self.item = item
        self.number = number
        self.arrived_at = arrived_at
        self.flow = flow
        self.strict = strict
        self.order = (-score, number)

    def __lt__(self, other: "Waiting[T]") -> bool:
        return self.order < other.order


class WaitingQueue(Generic[T]):
    """Bounded; by request id."""

    def __init__(
        self,
        max_length: int,
        aging_per_s: float,
        overdue_s: float,
        *,
        quantum_tokens: int = 4096,
        max_tenants: int = 1024,
    ) -> None:
        self._max_length = max_length
        self._aging_per_s = aging_per_s
        self._overdue_s = overdue_s
        self._by_id: dict[str, Waiting[T]] = {}
        # Of each tier, those of each flow in their order.
        self._tiers: dict[int, dict[FlowKey, list[Waiting[T]]]] = {}
        self._flows = RoundRobin(quantum_tokens, max_tenants)
        self._number = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def can_add(self) -> bool:
        return len(self._by_id) < self._max_length

    def add(
        self,
        request_id: str,
        item: T,
        *,
        strict_priority: int,
        priority: float,
        now: float,
        flow: FlowKey = ONE_FLOW,
        weight: float = 1.0,
    ) -> None:
        """Raise KeyError when the request waits already, OverflowError when the queue is full."""
        if request_id in self._by_id:
            raise KeyError(request_id)
        if not self.can_add():
            raise OverflowError
        self._number += 1
        score = priority - now * self._aging_per_s
        flow = self._flows.join(flow, weight)
        waiting = Waiting(item, self._number, now, flow, strict_priority, score)
        self._by_id[request_id] = waiting
        insort(self._tiers.setdefault(strict_priority, {}).setdefault(flow, []), waiting)

    def remove(self, request_id: str) -> T | None:
        """The request waits no more, whatever the reason."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        tier = self._tiers[waiting.strict]
        tier[waiting.flow].remove(waiting)
        if not tier[waiting.flow]:
            del tier[waiting.flow]
        if not tier:
            del self._tiers[waiting.strict]
        self._flows.leave(waiting.flow)
        return waiting.item

    def take_turn(self, request_id: str, tokens: int = 0) -> T | None:
        """`remove` because the request is served; ``tokens``: what has to be computed for it, which its tenant is charged."""
        waiting = self._by_id.get(request_id)
        if waiting is not None:
            self._turn += 1
            self._flows.charge(waiting.flow, tokens)
        return self.remove(request_id)

    def in_order(self, now: float) -> Iterator[Waiting[T]]:
        """Who is next, then who is next if that one cannot be served, and so on. Do not change the queue while iterating."""
        overdue = self._overdue(now)
        yield from overdue
        first = {waiting.number for waiting in overdue}
        for strict in sorted(self._tiers, reverse=True):
            tier = self._tiers[strict]
            for flow in self._flows.order(tier):
                for waiting in tier[flow]:
                    if waiting.number not in first:
                        yield waiting

    def items(self) -> list[T]:
        """Those that came first before the others."""
        return [waiting.item for waiting in self._by_id.values()]

    def _overdue(self, now: float) -> list[Waiting[T]]:
        """Those who have this turn because they have waited too long. The dict is in the order of arrival."""
        overdue: list[Waiting[T]] = []
        if self._turn % OVERDUE_TURN == OVERDUE_TURN - 1:
            for waiting in self._by_id.values():
                if now - waiting.arrived_at <= self._overdue_s:
                    break
                overdue.append(waiting)
        return overdue

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        flows = [(strict, key, those) for strict, tier in self._tiers.items() for key, those in tier.items()]
        if not all(those and sorted(those) == those for _, _, those in flows) or not all(self._tiers.values()):
            raise AssertionError("the queue is out of order")
        found = {waiting for _, _, those in flows for waiting in those}
        if found != set(self._by_id.values()) or any(
            (waiting.strict, waiting.flow) != (strict, key) for strict, key, those in flows for waiting in those
        ):
            raise AssertionError("a request waits in the wrong place")
        self._flows.check_integrity(dict(Counter(waiting.flow for waiting in self._by_id.values())))
        if len(self._by_id) > self._max_length:
            raise AssertionError("the queue is too long")
