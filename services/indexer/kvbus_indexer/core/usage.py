"""Which prefixes are read most, in bounded memory.

A query counts at depths 1, 2, 3, 5, 8, 12, 17 .. (each about 1.4 times the one before) of its chain, and at its end: keys are
chained, so the key at a depth stands for the whole prefix. When there are twice as many of them as shall be kept, the half that was
read least is forgotten. Counts are halved now and then, so that old uses weigh less.
"""

import math
from collections.abc import Sequence

import msgspec

from kvbus_wire.indexer import Match

_STEP = math.sqrt(2)


class Used(msgspec.Struct):
    """One prefix. ``parent``: key of the prefix that is counted before it in its chain."""

    model: str
    key: int
    depth: int
    reads: float
    parent: int


class ModelCounts(msgspec.Struct):
    """In blocks; see `kvbus_wire.indexer.ModelUse`."""

    asked: int = 0
    found: int = 0


def counted_depths(length: int) -> list[int]:
    """Where a chain of ``length`` blocks is counted."""
    depths, depth = [], 1
    while depth < length:
        depths.append(depth)
        depth = max(depth + 1, math.ceil(depth * _STEP))
    return [*depths, length] if length else []


class Usage:
    """Times are monotonic seconds. ``max_prefixes``: kept at least; ``max_models``: whose blocks are counted."""

    def __init__(self, max_prefixes: int, halving_s: float, max_models: int = 256) -> None:
        self._max_prefixes = max_prefixes
        self._max_models = max_models
        self._halving_s = halving_s
        self._halved_at: float | None = None
        self._used: dict[tuple[str, int], Used] = {}
        self._models: dict[str, ModelCounts] = {}

    def __len__(self) -> int:
        return len(self._used)

    def of(self, model: str) -> ModelCounts:
        return self._models.get(model) or ModelCounts()

    def read(self, model: str, keys: Sequence[int], matches: Sequence[Match], now: float) -> None:
        """A query with this chain was answered so."""
        if model not in self._models and len(self._models) >= self._max_models:
            return
        counts = self._models.setdefault(model, ModelCounts())
        counts.asked += len(keys)
        counts.found += max((match.depth for match in matches if not match.predicted), default=0)
        self._age(now)
        above = 0
        for depth in counted_depths(len(keys)):
            key = keys[depth - 1]
            self._count(model, key, depth, above)
            above = key

    def top(self, model: str, limit: int) -> list[Used]:
        """The prefixes with most reads times depth, without those that are only the beginning of another one that is read as
        often: its reads are the same requests. ``model``: empty for all."""
        best = sorted(
            (used for used in self._used.values() if not model or used.model == model),
            key=lambda used: (used.reads * used.depth, used.depth),
            reverse=True,
        )
        followed: dict[tuple[str, int], float] = {}
        for used in best:
            above = (used.model, used.parent)
            followed[above] = max(followed.get(above, 0.0), used.reads)
        distinct = (used for used in best if followed.get((used.model, used.key), 0.0) < 0.9 * used.reads)
        return [used for used, _ in zip(distinct, range(limit), strict=False)]

    def _count(self, model: str, key: int, depth: int, above: int) -> None:
        used = self._used.get((model, key))
        if used is None:
            if len(self._used) >= 2 * self._max_prefixes:
                most = sorted(self._used.items(), key=lambda item: item[1].reads, reverse=True)
                self._used = dict(most[: self._max_prefixes])
            used = self._used[model, key] = Used(model, key, depth, 0.0, above)
        used.reads += 1

    def _age(self, now: float) -> None:
        if self._halved_at is None:
            self._halved_at = now
        while now >= self._halved_at + self._halving_s:
            self._halved_at += self._halving_s
            for name, used in list(self._used.items()):
                used.reads /= 2
                if used.reads < 0.5:
                    del self._used[name]
