"""Whose turn it is to use the place that an ended request leaves in its policy class.

All routers hear of an end at the same moment, and of what another makes of it a little later. If each placed one of those that wait
there, a class would have as many too many placed as there are other routers, at every end. So the place is offered to one router
after the other: to the one that the request's id stands for at once, to the next in the circle of their names `LEAD_S` later, and
so on. Until then it counts as taken. Routers that do not agree on who there is may offer it to two.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from zlib import crc32

from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.shares import Shares

LEAD_S = 0.05
"""Enough for a decision to reach the others."""


class Turns:
    """Times are monotonic seconds."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._routers = [router_id]
        self._offered: list[tuple[float, FlowKey]] = []
        self._taken = Shares()

    @property
    def routers(self) -> int:
        return len(self._routers)

    def set_routers(self, router_ids: Iterable[str]) -> None:
        """Who there is, this one in any case."""
        self._routers = sorted({self._router_id, *router_ids})

    def ended(self, request_id: str, flow: FlowKey, now: float) -> None:
        first = crc32(request_id.encode()) % self.routers
        behind = (self._routers.index(self._router_id) - first) % self.routers
        if behind:
            heappush(self._offered, (now + behind * LEAD_S, flow))
            self._taken.add(flow)

    def advance(self, now: float) -> None:
        while self.due <= now:
            self._taken.drop(heappop(self._offered)[1])

    @property
    def due(self) -> float:
        """When the next place becomes this router's."""
        return self._offered[0][0] if self._offered else inf

    def of_class(self, name: str) -> int:
        """Places that are still others'."""
        return self._taken.of_class(name)

    def of_flow(self, flow: FlowKey) -> int:
        return self._taken.of_flow(flow)
