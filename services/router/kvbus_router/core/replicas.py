"""Which of several replicas of a service to ask: one that hangs, or whose host is cut off, is left alone, and others are not."""

from collections.abc import Collection, Iterable
from random import Random

import msgspec


class _Replica(msgspec.Struct):
    """``failures``: in a row. ``paused_until``: not asked before."""

    failures: int = 0
    paused_until: float = 0.0


class Replicas:
    """After ``max_failures`` failures in a row a replica is left alone for ``pause_s``; then one question at a time tries it."""

    def __init__(self, max_failures: int, pause_s: float, rng: Random) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._rng = rng
        self._replicas: dict[str, _Replica] = {}

    def set(self, names: Iterable[str]) -> None:
        """There are these, and no others. What is known of those that stay is kept."""
        self._replicas = {name: self._replicas.get(name, _Replica()) for name in names}

    def pick(self, now: float, tried: Collection[str] = ()) -> str | None:
        """Any that is not paused and was not tried; None: there is none. Tell afterwards whether it has `answered` or `failed`."""
        names = [name for name, replica in self._replicas.items() if name not in tried and replica.paused_until <= now]
        if not names:
            return None
        name = self._rng.choice(names)
        replica = self._replicas[name]
        if replica.failures >= self._max_failures:
            # This question tries it; the others do not wait for what comes of that.
            replica.paused_until = now + self._pause_s
        return name

    def answered(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None:
            replica.failures, replica.paused_until = 0, 0.0

    def failed(self, name: str, now: float) -> bool:
        """Whether this is the failure that pauses it."""
        replica = self._replicas.get(name)
        if replica is None:
            return False
        replica.failures += 1
        if replica.failures >= self._max_failures:
            replica.paused_until = now + self._pause_s
        return replica.failures == self._max_failures
