"""Blocks that come from other workers, or from kvbm, right now, so that requests with the same prompt wait for them instead of
fetching, or computing, them once more. Pure but for the events that others wait on, which whoever owns this makes.

Pulls are numbered as they begin, and one waits only for blocks of those that began before it: so none can wait in a circle.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Signal(Protocol):
    def set(self) -> object:
        """Wake all who wait."""

    async def wait(self) -> object:
        """Return once it is set."""


class Coming:
    """``make``: a new event; one per key that somebody waits for, set when the block has come or a pull brings it no more."""

    def __init__(self, make: Callable[[], Signal]) -> None:
        self._make = make
        self._pulls: dict[bytes, set[int]] = {}
        self._signals: dict[bytes, Signal] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._pulls)

    def number(self) -> int:
        """Of a pull that begins."""
        self._last += 1
        return self._last

    def begin(self, pull: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pulls.setdefault(key, set()).add(pull)

    def end(self, pull: int, keys: Iterable[bytes]) -> None:
        """They have come, or do not. Idempotent."""
        for key in keys:
            pulls = self._pulls.get(key)
            if pulls is None or pull not in pulls:
                continue
            pulls.discard(pull)
            if not pulls:
                del self._pulls[key]
            if (signal := self._signals.pop(key, None)) is not None:
                signal.set()

    def shared(self, keys: Sequence[bytes], have: int, pull: int) -> int:
        """Behind which block the run ends that begins behind the first ``have`` and that pulls before this one bring."""
        last = have
        while last < len(keys) and min(self._pulls.get(keys[last], ()), default=pull) < pull:
            last += 1
        return last

    def signal(self, key: bytes) -> Signal:
        """For a key that comes."""
        if key not in self._signals:
            self._signals[key] = self._make()
        return self._signals[key]
