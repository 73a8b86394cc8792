"""What became of events and blocks, counted one by one."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from kvbus_wire.kv_events import KvEvent, Removed, Stored


class Fate(StrEnum):
    """Of an event."""

    APPLIED = "applied"
    PARENT_NOT_FOUND = "parent_not_found"
    DUPLICATE = "duplicate"
    STALE = "stale_incarnation"
    UNKNOWN_INSTANCE = "unknown_instance"
    GAP = "gap"
    DEFERRED = "deferred"
    BUFFERED = "buffered"
    OVERFLOW = "buffer_overflow"
    TOO_MANY_FEEDS = "too_many_feeds"
    INVALID = "invalid"


class Blocks(StrEnum):
    """Of a block."""

    ADDED = "added"
    REMOVED = "removed"
    ORPHAN = "parent_not_found"
    COLLISION = "collision"
    REFUSED = "refused_full"


class Counts(Protocol):
    def events(self, fate: Fate, kind: str, count: int) -> None:
        """``kind``: stored, removed or cleared."""

    def blocks(self, what: Blocks, count: int) -> None: ...


def count_events(counts: Counts, fate: Fate, events: Iterable[KvEvent]) -> None:
    """By kind."""
    for kind, count in Counter(map(kind_of, events)).items():
        counts.events(fate, kind, count)


def kind_of(event: KvEvent) -> str:
    match event:
        case Stored():
            return "stored"
        case Removed():
            return "removed"
    return "cleared"


class NoCounts:
    """Counts nothing."""

    def events(self, fate: Fate, kind: str, count: int) -> None:
        pass

    def blocks(self, what: Blocks, count: int) -> None:
        pass
