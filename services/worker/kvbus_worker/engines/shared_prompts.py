"""Prompt blocks that somebody is going to compute, so that others with the same prefix wait instead of computing them again.

`announced` blocks are those of requests that still wait: they only tell how much of a later prompt will be found. `computing` ones
belong to a running request, which others may follow.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

S = TypeVar("S")


class SharedPrompts(Generic[S]):
    def __init__(self) -> None:
        self._announced: dict[bytes, S] = {}
        self._computing: dict[bytes, S] = {}

    def announce(self, sequence: S, keys: Iterable[bytes]) -> None:
        """The sequence waits, and will compute these."""
        for key in keys:
            self._announced.setdefault(key, sequence)

    def begin(self, sequence: S, keys: Iterable[bytes]) -> None:
        """The sequence runs, and will compute these."""
        for key in keys:
            self._computing.setdefault(key, sequence)

    def computed(self, sequence: S, key: bytes) -> None:
        """The block is there, whoever else wanted to compute it."""
        self._announced.pop(key, None)
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def leave(self, sequence: S, keys: Iterable[bytes]) -> None:
        """The sequence will not compute these (now)."""
        for key in keys:
            for blocks in (self._announced, self._computing):
                if blocks.get(key) is sequence:
                    del blocks[key]

    def owner(self, key: bytes) -> S | None:
        """The running sequence that is going to compute the block."""
        return self._computing.get(key)

    def expected(self, keys: Sequence[bytes], start: int) -> int:
        """How many leading keys there will be, when the first ``start`` are there."""
        while start < len(keys) and (keys[start] in self._computing or keys[start] in self._announced):
            start += 1
        return start

    def owners(self) -> Iterable[S]:
        """Running ones, for checks."""
        return self._computing.values()

    def announcers(self) -> Iterable[S]:
        """Those that said what they will compute, for checks."""
        return self._announced.values()

    def clear(self) -> None:
        self._announced.clear()
        self._computing.clear()
