"""When the blocks of a session that waits for a tool are to be brought back, and what they are."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count

from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt

PROMPT_BYTES = 3000
"""Of a kept prompt beside its tokens and keys."""
DURATIONS = 32
"""So many of a tool's last runs tell how long the next one takes."""
FEWEST_DURATIONS = 3
EARLY_SHARE = 0.25
"""Of the last runs so many may have been shorter than what is expected: early blocks cost less than late ones."""


class KeptPrompts:
    """What the sessions' next prompts begin with. Bounded in bytes; what was used least recently goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[Hashable, Job] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Hashable, job: Job) -> None:
        """``job``: with the prompt to bring back. One that does not fit at all is not kept."""
        self.drop(key)
        if _size(job.prompt) > self._limit_bytes:
            return
        self._kept[key] = job
        self.size_bytes += _size(job.prompt)
        while self.size_bytes > self._limit_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.size_bytes -= _size(oldest.prompt)

    def find(self, key: Hashable) -> Job | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def drop(self, key: Hashable) -> None:
        if (gone := self._kept.pop(key, None)) is not None:
            self.size_bytes -= _size(gone.prompt)


class ToolTimes:
    """How long tools have run, by name. Bounded in number; ``owner``: one tenant learns nothing of another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[tuple[Hashable, str], list[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def note(self, owner: Hashable, tool: str, seconds: float) -> None:
        runs = self._runs.setdefault((owner, tool), [])
        self._runs.move_to_end((owner, tool))
        runs.append(seconds)
        del runs[:-DURATIONS]
        while len(self._runs) > self._limit:
            self._runs.popitem(last=False)

    def expected(self, owner: Hashable, tools: Sequence[str]) -> float | None:
        """How long it takes at least, most likely, until the results of calls made at once are there; None: too little is known of
        all of them."""
        known = (self._runs.get((owner, tool), ()) for tool in tools)
        least = [sorted(runs)[int(len(runs) * EARLY_SHARE)] for runs in known if len(runs) >= FEWEST_DURATIONS]
        return max(least, default=None)


class Agenda:
    """What is due when. At most one entry per key, and at most ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._due: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._due)

    def put(self, key: Hashable, at: float) -> bool:
        """Instead of what was there of this key. False: there is no room."""
        if key not in self._due and len(self._due) >= self._limit:
            return False
        number = next(self._numbers)
        self._due[key] = (at, number)
        heapq.heappush(self._heap, (at, number, key))
        if len(self._heap) > 2 * self._limit + 64:
            self._heap = [(at, number, key) for key, (at, number) in self._due.items()]
            heapq.heapify(self._heap)
        return True

    def drop(self, key: Hashable) -> bool:
        return self._due.pop(key, None) is not None

    def at(self, key: Hashable) -> float | None:
        due = self._due.get(key)
        return None if due is None else due[0]

    def next_at(self) -> float | None:
        self._tidy()
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Iterator[Hashable]:
        """What is due; it is on the agenda no more."""
        while True:
            self._tidy()
            if not self._heap or self._heap[0][0] > now:
                return
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            yield key

    def _tidy(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)


def prefetch_at(ended_s: float, expected_s: float, *, lead_s: float, shortest_s: float) -> float | None:
    """When to begin, for a request that is expected so long after the one before has ended. None: not at all, since until then the
    blocks stay where they are."""
    if expected_s < shortest_s:
        return None
    return ended_s + max(0.0, expected_s - lead_s)


def _size(prompt: Prompt) -> int:
    return PROMPT_BYTES + len(prompt.tokens) + len(prompt.keys)
