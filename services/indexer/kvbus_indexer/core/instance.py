"""What the indexer knows about one instance besides its blocks."""

from enum import StrEnum
from typing import NamedTuple

from kvbus_blocks.keys import KEY_BYTES
from kvbus_indexer.core.sources import EventSource
from kvbus_wire.kv_events import KvEvents, Removed, Stored
from kvbus_wire.records import InstanceRecord


class Phase(StrEnum):
    """LIVE: events apply. WANTED: something is missing, a repair will be asked for. FETCHING: it is on its way.

    Events that arrive while a snapshot is wanted need not be kept: it is taken after they were sent. All others are kept: those
    that arrive while it is fetched may be younger, and a replay of the stream brings back one feed of the instance only.
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


class Missing(NamedTuple):
    """Events of a feed up to ``seq`` exist, and have not all been applied."""

    feed: FeedKey
    seq: int


class Replay(NamedTuple):
    """Read the stream again, this feed's messages behind number ``after``."""

    feed: FeedKey
    after: int


class Order(NamedTuple):
    """Repair the instance: from the stream if ``replay`` says so, else by a snapshot of its blocks.

    ``ticket``: the outcome only counts while nothing else has happened to the instance.
    """

    instance_id: str
    ticket: int
    reason: str
    replay: Replay | None = None


class Buffered(NamedTuple):
    batch: KvEvents
    stream_seq: int


class Instance:
    """One instance of the directory in its newest incarnation.

    ``capacity``: blocks that a worker can hold in G1. ``has_events``: its record does not say that it has none; what an instance
    without events answers to a snapshot would be a ghost a moment later, so it is never asked for one.
    """

    def __init__(self, record: InstanceRecord) -> None:
        worker = record.worker
        self.instance_id = record.instance_id
        self.incarnation = record.incarnation
        self.is_worker = worker is not None
        self.capacity = worker.total_blocks if worker is not None else 0
        self.has_events = worker is None or worker.kv_events
        self.source = EventSource(declared=not self.has_events)
        self.phase = Phase.LIVE
        # Last applied event per feed, and where in the stream it was.
        self.applied: dict[FeedKey, int] = {}
        self.position: dict[FeedKey, int] = {}
        # All its feeds were in the checkpoint that the indexer started from.
        self.restored = False
        # An event of it was applied: it has an event source.
        self.heard = False
        # Stores were refused for want of room, so the content is only a part: right, but not all.
        self.partial = False
        self.refill_at = 0.0
        self.lag: Lag | None = None
        self.reason = ""
        # What a replay of the stream may repair; None: a snapshot is needed.
        self.missing: Missing | None = None
        self.not_before = 0.0
        self.fetched_at = float("-inf")
        # Where the stream was read to when the snapshot was asked for.
        self.fetched_position = 0
        self.attempts = 0
        self.ticket = 0
        # Of the snapshot that is being fetched: the last event it includes, per feed.
        self.snapshot: dict[FeedKey, int] = {}
        self.buffer: list[Buffered] = []
        self.buffered_keys = 0
        self.overflowed = False

    @property
    def keeps_events(self) -> bool:
        """Events that arrive now will be needed after the repair."""
        return self.phase is Phase.FETCHING or (self.phase is Phase.WANTED and self.missing is not None)

    def drop_buffer(self) -> list[Buffered]:
        buffer, self.buffer, self.buffered_keys = self.buffer, [], 0
        return buffer


def key_count(batch: KvEvents) -> int:
    """What a batch weighs in a buffer."""
    return sum(1 + len(event.keys) // KEY_BYTES if isinstance(event, Stored | Removed) else 1 for event in batch.events)
