"""What a request says of the blocks of its chain, by their position."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from kvbus_blocks.retention import Directive
from kvbus_worker.engines.base import DirectiveRun

_start = attrgetter("start")


class Said:
    """``runs``: in order, without overlaps."""

    __slots__ = ("_runs",)

    def __init__(self, runs: Sequence[DirectiveRun] = ()) -> None:
        self._runs = runs

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __getitem__(self, index: int) -> Directive | None:
        """None: nothing is said of block ``index``."""
        at = bisect_right(self._runs, index, key=_start) - 1
        if at < 0:
            return None
        run = self._runs[at]
        return run.directive if run.end is None or index < run.end else None

    def of(self, first: int, end: int) -> list[Directive | None]:
        """Of the blocks [``first``, ``end``)."""
        said: list[Directive | None] = [None] * max(end - first, 0)
        for run in self._runs:
            start, stop = max(run.start, first), end if run.end is None else min(run.end, end)
            if start < stop:
                said[start - first : stop - first] = [run.directive] * (stop - start)
        return said

    def pieces(self, first: int, end: int) -> list[tuple[int, int, Directive | None]]:
        """[start, end) of the blocks in a row of [``first``, ``end``) of which the same is said."""
        pieces: list[tuple[int, int, Directive | None]] = []
        for run in self._runs:
            start, stop = max(run.start, first), end if run.end is None else min(run.end, end)
            if start >= stop:
                continue
            if first < start:
                pieces.append((first, start, None))
            pieces.append((start, stop, run.directive))
            first = stop
        if first < end:
            pieces.append((first, end, None))
        return pieces


NOTHING_SAID = Said()
