"""Virtual time: what is due next happens next."""

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """Seconds since the start. Things due at the same moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._planned = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` then, or now when that has passed."""
        self._planned += 1
        heappush(self._due, (max(when_s, self.now), self._planned, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._due:
            self.now, _, action = heappop(self._due)
            self.events += 1
            action()
