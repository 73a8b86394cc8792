"""What the indexer knows about one instance besides its blocks."""

from enum import StrEnum
from typing import NamedTuple

from kvbus_blocks.keys import KEY_BYTES
from kvbus_wire.kv_events import KvEvents, Removed, Stored


class Phase(StrEnum):
    """LIVE: events apply. WANTED: something is missing, a snapshot will be asked for. FETCHING: it is on its way.

    Events that arrive while a snapshot is wanted need not be kept: they were sent before it is taken, so it includes them. Those
    that arrive while it is fetched may be younger, and are kept.
    """

    LIVE = "live"
    WANTED = "wanted"
    FETCHING = "fetching"


class FeedKey(NamedTuple):
    """One numbered sequence of events. An instance that holds several tiers or models numbers each for itself."""

    model: str
    tier: str


class Lag(NamedTuple):
    """The instance says it has sent event ``seq``, which had not arrived at time ``since``."""

    feed: FeedKey
    seq: int
    since: float


class Order(NamedTuple):
    """Fetch a snapshot of the instance. ``ticket``: its outcome only counts while nothing else has happened to the instance."""

    instance_id: str
    ticket: int
    reason: str


class Instance:
    """One instance of the directory in its newest incarnation."""

    def __init__(self, instance_id: str, service: str, incarnation: int) -> None:
        self.instance_id = instance_id
        self.service = service
        self.incarnation = incarnation
        self.phase = Phase.LIVE
        # Last applied event per feed.
        self.applied: dict[FeedKey, int] = {}
        # Stores were refused for want of room, so the content is only a part: right, but not all.
        self.partial = False
        self.refill_at = 0.0
        self.lag: Lag | None = None
        self.reason = ""
        self.not_before = 0.0
        self.fetched_at = float("-inf")
        self.attempts = 0
        self.ticket = 0
        # Of the snapshot that is being fetched: the last event it includes, per feed.
        self.snapshot: dict[FeedKey, int] = {}
        self.buffer: list[KvEvents] = []
        self.buffered_keys = 0
        self.overflowed = False

    def drop_buffer(self) -> list[KvEvents]:
        buffer, self.buffer, self.buffered_keys = self.buffer, [], 0
        return buffer


def key_count(batch: KvEvents) -> int:
    """What a batch weighs in a buffer."""
    return sum(1 + len(event.keys) // KEY_BYTES if isinstance(event, Stored | Removed) else 1 for event in batch.events)
