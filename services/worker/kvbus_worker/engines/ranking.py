"""The order in which an engine serves its requests, and whose room a request may take.

A place is known on arrival, since all wait at the same speed:

    urgency + (now - arrived)   is ordered as   urgency - arrived
    urgency = PRIORITY_S * priority + STRICT_S * strict_priority         in seconds of waiting

Both hints are cut off, so nothing is overtaken by what came more than `LONGEST_LEAD_S` later, and nothing starves in an engine,
whatever arrives. A strict tier is absolute in the router's queue, and worth a minute here.
"""

from typing import NamedTuple

PRIORITY_S = 10.0
STRICT_S = 60.0
MAX_PRIORITY = 100
MAX_STRICT_PRIORITY = 10
LONGEST_LEAD_S = 2 * PRIORITY_S * MAX_PRIORITY + STRICT_S * MAX_STRICT_PRIORITY


class Rank(NamedTuple):
    """Sorts as requests are served. ``due``: when it would have arrived without any urgency; ``arrival``: numbers arrivals."""

    due: float
    arrival: int
    urgency: float

    def outranks(self, other: "Rank") -> bool:
        """Whether a request may take another's room: it is more urgent, and the other has not made up for that by waiting."""
        return self.urgency > other.urgency and self < other


def rank(priority: float, strict_priority: int, arrival: int, now_s: float) -> Rank:
    urgency = PRIORITY_S * max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
    urgency += STRICT_S * max(0, min(strict_priority, MAX_STRICT_PRIORITY))
    return Rank(now_s - urgency, arrival, urgency)
