"""Applies KV events to the indexes, and knows for each instance whether its content can be trusted.

Per instance and incarnation events apply in order, each once:

    event number            what happens
    <= applied              ignored: it was delivered twice
    == applied + 1          applied
    >  applied + 1          a gap: nothing applies until a snapshot of the instance has repaired it

Content exists only for instances that the directory knows, and only of their newest incarnation. Whatever happens besides (an
event of an instance not in the directory yet, a worker that has sent more than arrived, a join) ends in a snapshot, too.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from kvbus_blocks.index import Owner, PrefixIndex
from kvbus_blocks.keys import KEY_BYTES
from kvbus_indexer.core.content import Content
from kvbus_indexer.core.instance import FeedKey, Instance, Lag, Order, Phase, key_count
from kvbus_indexer.core.limits import Limits
from kvbus_wire.indexer import Match
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import short_key, short_keys
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain

G1 = "g1"


class Fate(StrEnum):
    """What became of events (counted one by one)."""

    APPLIED = "applied"
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
    """What became of blocks (counted one by one)."""

    ADDED = "added"
    REMOVED = "removed"
    ORPHAN = "unknown_parent"
    COLLISION = "collision"
    REFUSED = "refused_full"


Count = Callable[[Fate | Blocks, int], None]


def _ignore(what: Fate | Blocks, count: int) -> None:
    pass


def _is_chain(chain: Stored | SnapshotChain) -> bool:
    return not len(chain.keys) % KEY_BYTES and len(chain.parent) in (0, KEY_BYTES)


def _is_valid(event: KvEvent) -> bool:
    match event:
        case Stored():
            return _is_chain(event)
        case Removed(keys):
            return not len(keys) % KEY_BYTES
        case Cleared():
            return True


class Catalog:
    """The indexer's whole state. Times are monotonic seconds."""

    def __init__(self, limits: Limits, make_index: Callable[[], PrefixIndex], count: Count = _ignore) -> None:
        self.limits = limits
        self.content = Content(make_index, limits.max_entries)
        self.caught_up = False
        # Something may be due now or at a new time; whoever calls `due` resets it.
        self.attention = False
        self._count = count
        self._instances: dict[str, Instance] = {}
        self._tickets = 0

    # -- the directory

    def joined(self, record: InstanceRecord, now: float) -> None:
        """A record is new or has changed."""
        if record.worker is None and record.kvbm is None:
            return
        instance = self._instances.get(record.instance_id)
        if instance is None:
            instance = Instance(record.instance_id, record.service, record.incarnation)
            self._instances[record.instance_id] = instance
        elif record.incarnation > instance.incarnation:
            instance = self._restart(instance, record.incarnation)
        else:
            return
        if self.caught_up:
            # Its first events may have arrived before its record did, and were ignored then.
            self.want(instance, "joined", now)

    def left(self, instance_id: str) -> None:
        if self._instances.pop(instance_id, None) is not None:
            self._count(Blocks.REMOVED, self.content.drop(instance_id))

    # -- the stream of events

    def apply(self, batch: KvEvents, now: float) -> None:
        instance = self._instances.get(batch.instance_id)
        size = len(batch.events)
        if instance is None or batch.incarnation > instance.incarnation:
            # The directory alone says who is there: a number from a wrong clock would shut out what really runs, for good.
            self._count(Fate.UNKNOWN_INSTANCE, size)
        elif batch.incarnation < instance.incarnation:
            self._count(Fate.STALE, size)
        elif not all(map(_is_valid, batch.events)):
            self._count(Fate.INVALID, size)
            self.want(instance, "invalid", now)
        else:
            self._receive(instance, batch, now)

    def stream_caught_up(self, now: float) -> None:
        """All events that the stream held at the start were delivered. From here on, what is missing is repaired."""
        self.caught_up = self.attention = True
        for instance in self._instances.values():
            if instance.phase is Phase.LIVE and not instance.applied:
                self.want(instance, "unseen", now)

    def reconnected(self, now: float) -> None:
        """The bus was away. A lost last event of a worker shows in its load reports; others do not report any."""
        if self.caught_up:
            for instance in self._instances.values():
                if instance.service != "worker" and instance.phase is Phase.LIVE:
                    self.want(instance, "reconnected", now)

    def load_report(self, report: LoadReport, now: float) -> None:
        """A worker that has sent more events than arrived gets a moment, then a repair."""
        instance = self._instances.get(report.instance_id)
        if instance is None or instance.incarnation != report.incarnation or not self.caught_up:
            return
        feed = FeedKey(report.model, G1)
        if instance.lag is None and report.kv_seq > instance.applied.get(feed, 0):
            instance.lag = Lag(feed, report.kv_seq, now)
            self.attention = True

    # -- queries (the counts are also read by the thread that renders the metrics, hence the copies)

    def match(self, model: str, keys: Sequence[int]) -> tuple[Match, ...]:
        found = self.content.match(model, keys)
        return tuple(Match(instance_id=owner.instance_id, tier=owner.tier, depth=d) for owner, d in found.items())

    def in_phase(self, phase: Phase) -> int:
        return sum(instance.phase is phase for instance in list(self._instances.values()))

    @property
    def instances(self) -> int:
        return len(self._instances)

    @property
    def partial_instances(self) -> int:
        return sum(instance.partial for instance in list(self._instances.values()))

    def workers_without_events(self) -> list[str]:
        """Workers of which no event was ever applied: idle ones, and those whose events do not reach the stream."""
        workers = [i for i in list(self._instances.values()) if i.service == "worker"]
        return [worker.instance_id for worker in workers if not any(list(worker.applied.values()))]

    # -- repairs

    def want(self, instance: Instance, reason: str, now: float) -> None:
        """The instance needs a snapshot. Not more often than the first back-off, so that no repair chases the other."""
        self.attention = True
        instance.phase = Phase.WANTED
        instance.reason = reason
        instance.drop_buffer()
        for feed in instance.snapshot:
            instance.applied.setdefault(feed, 0)
        instance.snapshot = {}
        instance.not_before = max(now, instance.fetched_at + self.limits.repair_backoff_s)

    def due(self, now: float) -> list[Order]:
        """The repairs to start now. Each must end in `finish` or `fail`."""
        self.attention = False
        if not self.caught_up:
            return []
        for instance in self._instances.values():
            self._check_lag(instance, now)
            self._check_room(instance, now)
        free = self.limits.max_repairs - self.in_phase(Phase.FETCHING)
        waiting = [i for i in self._instances.values() if i.phase is Phase.WANTED and i.not_before <= now]
        waiting.sort(key=lambda instance: instance.not_before)
        return [self._begin(instance, now) for instance in waiting[: max(0, free)]]

    def next_due(self) -> float | None:
        """When `due` may have something new, if nothing else happens before."""
        if not self.caught_up:
            return None
        times = []
        room = self.in_phase(Phase.FETCHING) < self.limits.max_repairs
        for instance in self._instances.values():
            if instance.phase is Phase.WANTED and room:
                times.append(instance.not_before)
            elif instance.phase is Phase.LIVE:
                if instance.lag is not None:
                    times.append(instance.lag.since + self.limits.lag_s)
                if instance.partial:
                    times.append(instance.refill_at)
        return min(times, default=None)

    def chunk(self, order: Order, chunk: BlockSnapshotChunk, now: float) -> bool:
        """Take over a part of a snapshot. False: it is not wanted any more, stop fetching."""
        instance = self._fetching(order)
        if instance is None:
            return False
        if chunk.instance_id != instance.instance_id or chunk.incarnation != instance.incarnation:
            self.fail(order, now)
            return False
        feed = FeedKey(chunk.model, chunk.tier)
        owner = Owner(instance.instance_id, chunk.tier)
        if feed not in instance.snapshot:
            if len(instance.snapshot) >= self.limits.max_feeds_per_instance:
                self._count(Fate.TOO_MANY_FEEDS, 1)
                return True
            self._count(Blocks.REMOVED, self.content.clear(chunk.model, owner))
            instance.snapshot[feed] = chunk.kv_seq
        elif instance.snapshot[feed] != chunk.kv_seq:
            self.fail(order, now)
            return False
        for chain in chunk.chains:
            if not _is_chain(chain):
                self.fail(order, now)
                return False
            self._store(instance, chunk.model, owner, chain, now)
        return True

    def finish(self, order: Order, now: float) -> bool:
        """The snapshot was complete. False: it is not wanted any more."""
        instance = self._fetching(order)
        if instance is None:
            return False
        for feed in instance.applied.keys() - instance.snapshot.keys():
            self._count(Blocks.REMOVED, self.content.clear(feed.model, Owner(instance.instance_id, feed.tier)))
        instance.applied, instance.snapshot = instance.snapshot, {}
        self.attention = True
        instance.phase = Phase.LIVE
        instance.attempts = 0
        buffer = instance.drop_buffer()
        if instance.overflowed:
            self.want(instance, "overflow", now)
        for batch in buffer:
            self._receive(instance, batch, now)
        self._renew_lag(instance, now)
        return True

    def fail(self, order: Order, now: float) -> None:
        """The snapshot could not be fetched. After some failures what is known of the instance is given up as too old."""
        instance = self._fetching(order)
        if instance is None:
            return
        instance.attempts += 1
        self.want(instance, instance.reason, now)
        delay = self.limits.repair_backoff_s * 2 ** min(instance.attempts - 1, 16)
        instance.not_before = now + min(delay, self.limits.repair_backoff_max_s)
        if instance.attempts == self.limits.repair_give_up:
            self._count(Blocks.REMOVED, self.content.drop(instance.instance_id))

    def check_integrity(self) -> None:
        self.content.check_integrity()
        for index in self.content.indexes.values():
            sizes = index.sizes()
            if sizes.orphans > sizes.entries:
                raise AssertionError("more orphans than entries")
        for instance in self._instances.values():
            if (instance.phase is not Phase.FETCHING) and (instance.buffer or instance.snapshot):
                raise AssertionError("a buffer without a fetch")
            if instance.buffered_keys > self.limits.max_buffered_keys:
                raise AssertionError("the buffer is over its limit")
        if self.in_phase(Phase.FETCHING) > self.limits.max_repairs:
            raise AssertionError("too many repairs at once")

    # -- inside

    def _restart(self, old: Instance, incarnation: int) -> Instance:
        """Nothing of the previous incarnation holds; a repair of it that is under way is void."""
        self._count(Blocks.REMOVED, self.content.drop(old.instance_id))
        instance = self._instances[old.instance_id] = Instance(old.instance_id, old.service, incarnation)
        return instance

    def _receive(self, instance: Instance, batch: KvEvents, now: float) -> None:
        size = len(batch.events)
        if instance.phase is Phase.WANTED:
            self._count(Fate.DEFERRED, size)
        elif instance.phase is Phase.FETCHING:
            self._buffer(instance, batch)
        else:
            self._advance(instance, batch, now)

    def _buffer(self, instance: Instance, batch: KvEvents) -> None:
        weight = key_count(batch)
        if instance.overflowed or instance.buffered_keys + weight > self.limits.max_buffered_keys:
            instance.overflowed = True
            instance.drop_buffer()
            self._count(Fate.OVERFLOW, len(batch.events))
            return
        instance.buffer.append(batch)
        instance.buffered_keys += weight
        self._count(Fate.BUFFERED, len(batch.events))

    def _advance(self, instance: Instance, batch: KvEvents, now: float) -> None:
        feed = FeedKey(batch.model, batch.tier)
        applied = instance.applied.get(feed, 0)
        size = len(batch.events)
        if batch.last_seq <= applied:
            self._count(Fate.DUPLICATE, size)
        elif batch.first_seq > applied + 1:
            self._count(Fate.GAP, size)
            self.want(instance, "gap", now)
        elif feed not in instance.applied and len(instance.applied) >= self.limits.max_feeds_per_instance:
            self._count(Fate.TOO_MANY_FEEDS, size)
        else:
            known = applied + 1 - batch.first_seq
            self._count(Fate.DUPLICATE, known)
            for event in batch.events[known:]:
                self._apply_event(instance, batch, event, now)
            self._count(Fate.APPLIED, size - known)
            instance.applied[feed] = batch.last_seq
            self._end_lag(instance)

    def _apply_event(self, instance: Instance, batch: KvEvents, event: KvEvent, now: float) -> None:
        owner = Owner(batch.instance_id, batch.tier)
        match event:
            case Stored():
                self._store(instance, batch.model, owner, event, now)
            case Removed(keys):
                self._count(Blocks.REMOVED, self.content.remove(batch.model, owner, short_keys(keys)))
            case Cleared():
                self._count(Blocks.REMOVED, self.content.clear(batch.model, owner))

    def _store(self, instance: Instance, model: str, owner: Owner, chain: Stored | SnapshotChain, now: float) -> None:
        if instance.partial:
            self._count(Blocks.REFUSED, len(chain.keys) // KEY_BYTES)
            return
        parent = short_key(chain.parent) if chain.parent else None
        outcome = self.content.store(model, owner, parent, short_keys(chain.keys))
        self._count(Blocks.ADDED, outcome.added)
        self._count(Blocks.ORPHAN, outcome.orphans)
        self._count(Blocks.COLLISION, outcome.collisions)
        if outcome.refused:
            self._count(Blocks.REFUSED, outcome.refused)
            instance.partial = True
            instance.refill_at = now + self.limits.refill_interval_s
            self.attention = True

    def _end_lag(self, instance: Instance) -> None:
        if instance.lag is not None and instance.applied.get(instance.lag.feed, 0) >= instance.lag.seq:
            instance.lag = None

    def _renew_lag(self, instance: Instance, now: float) -> None:
        """What was reported before the snapshot was asked for is in it; what was reported since may be on its way."""
        self._end_lag(instance)
        lag = instance.lag
        if lag is not None:
            instance.lag = lag._replace(since=now) if lag.since > instance.fetched_at else None

    def _check_lag(self, instance: Instance, now: float) -> None:
        lag = instance.lag
        if instance.phase is Phase.LIVE and lag is not None and now >= lag.since + self.limits.lag_s:
            self.want(instance, "lag", now)

    def _check_room(self, instance: Instance, now: float) -> None:
        if instance.phase is Phase.LIVE and instance.partial and instance.refill_at <= now:
            instance.refill_at = now + self.limits.refill_interval_s
            if self.content.entries <= self.limits.max_entries * self.limits.refill_ratio:
                self.want(instance, "room", now)

    def _begin(self, instance: Instance, now: float) -> Order:
        instance.phase = Phase.FETCHING
        instance.fetched_at = now
        self._tickets += 1
        instance.ticket = self._tickets
        instance.overflowed = False
        instance.partial = False
        return Order(instance.instance_id, instance.ticket, instance.reason)

    def _fetching(self, order: Order) -> Instance | None:
        instance = self._instances.get(order.instance_id)
        if instance is None or instance.phase is not Phase.FETCHING or instance.ticket != order.ticket:
            return None
        return instance
