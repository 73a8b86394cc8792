"""Blocks that come from other workers right now, so that requests with the same prompt wait for them instead of fetching, or
computing, them once more. Pure but for the events that others wait on, which whoever owns this makes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Signal(Protocol):
    def set(self) -> object:
        """Wake all who wait."""

    async def wait(self) -> object:
        """Return once it is set."""


class Coming:
    """By key, how many pulls bring it. ``make``: a new event; one per key that somebody waits for, set when the block has come or
    nobody brings it any more."""

    def __init__(self, make: Callable[[], Signal]) -> None:
        self._make = make
        self._pulls: dict[bytes, int] = {}
        self._signals: dict[bytes, Signal] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def __contains__(self, key: object) -> bool:
        return key in self._pulls

    def begin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pulls[key] = self._pulls.get(key, 0) + 1

    def end(self, keys: Iterable[bytes]) -> None:
        """They have come, or do not. Each key of `begin` once."""
        for key in keys:
            left = self._pulls.get(key, 0) - 1
            if left > 0:
                self._pulls[key] = left
                continue
            self._pulls.pop(key, None)
            if (signal := self._signals.pop(key, None)) is not None:
                signal.set()

    def last_shared(self, keys: Sequence[bytes], have: int) -> Signal | None:
        """An event for the last one of the blocks behind the first ``have`` that somebody brings; None when nobody brings the next
        one."""
        last = have
        while last < len(keys) and keys[last] in self._pulls:
            last += 1
        if last == have:
            return None
        key = keys[last - 1]
        if key not in self._signals:
            self._signals[key] = self._make()
        return self._signals[key]
