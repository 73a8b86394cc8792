"""Receives events while all is well, and says what to fetch when it is not: first the stream again, then a snapshot.

LIVE --gap, lag--> WANTED --due--> FETCHING (replay)   --finish: all is there--> LIVE
                     ^                    `--finish: the stream has lost it----.
                     `---------------------------------------------------------'  now by a snapshot
LIVE --any other--> WANTED --due--> FETCHING (snapshot) --finish--> LIVE
                     ^                    `--fail, with back-off--.
                     `---------------------------------------------'
"""

from kvbus_blocks.index import Owner
from kvbus_indexer.core.fates import Fate, count_events
from kvbus_indexer.core.instance import Buffered, FeedKey, Instance, Missing, Order, Phase, Replay, key_count
from kvbus_indexer.core.ledger import Ledger, is_chain
from kvbus_indexer.core.limits import Limits
from kvbus_wire.kv_events import KvEvents
from kvbus_wire.worker import BlockSnapshotChunk


class Repairs:
    """Times are monotonic seconds. ``instances`` is the catalog's own dictionary."""

    def __init__(self, instances: dict[str, Instance], ledger: Ledger, limits: Limits) -> None:
        self.limits = limits
        self.running = False
        """Nothing is repaired before the stream was read to its end."""
        self.attention = False
        """Something may be due now or at a new time; whoever calls `due` resets it."""
        self.position = 0
        """Number of the last message of the stream that was handled."""
        self._instances = instances
        self._ledger = ledger
        self._tickets = 0

    # -- events

    def receive(self, instance: Instance, batch: KvEvents, stream_seq: int, now: float) -> None:
        if instance.phase is Phase.LIVE:
            self._advance(instance, batch, stream_seq, now)
        elif instance.keeps_events:
            self._buffer(instance, batch, stream_seq)
        else:
            count_events(self._ledger.counts, Fate.DEFERRED, batch.events)

    def _advance(self, instance: Instance, batch: KvEvents, stream_seq: int, now: float) -> None:
        was_partial = instance.partial
        if self._ledger.advance(instance, batch, stream_seq, now):
            self._end_lag(instance)
        else:
            self.want(instance, "gap", now, Missing(FeedKey(batch.model, batch.tier), batch.last_seq))
        if instance.partial and not was_partial:
            self.attention = True

    def _buffer(self, instance: Instance, batch: KvEvents, stream_seq: int) -> None:
        weight = key_count(batch)
        if instance.overflowed or instance.buffered_keys + weight > self.limits.max_buffered_keys:
            instance.overflowed = True
            instance.drop_buffer()
            count_events(self._ledger.counts, Fate.OVERFLOW, batch.events)
            return
        instance.buffer.append(Buffered(batch, stream_seq))
        instance.buffered_keys += weight
        count_events(self._ledger.counts, Fate.BUFFERED, batch.events)

    # -- what is to be done

    def want(self, instance: Instance, reason: str, now: float, missing: Missing | None = None) -> None:
        """The instance needs a repair; ``missing``: one that the stream may bring. Snapshots are asked for not more often than
        the first back-off, so that no repair chases the other."""
        self.attention = True
        instance.phase = Phase.WANTED
        instance.reason = reason
        instance.missing = missing
        instance.drop_buffer()
        instance.overflowed = False
        for feed in instance.snapshot:
            instance.applied.setdefault(feed, 0)
        instance.snapshot = {}
        pause_s = self.limits.repair_backoff_s if missing is None else 0.0
        instance.not_before = max(now, instance.fetched_at + pause_s)

    def due(self, now: float) -> list[Order]:
        """The repairs to start now. Each must end in `finish` or `fail`."""
        self.attention = False
        if not self.running:
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
        if not self.running:
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

    def in_phase(self, phase: Phase) -> int:
        # A copy, because the thread that renders the metrics reads this, too.
        return sum(instance.phase is phase for instance in list(self._instances.values()))

    def _begin(self, instance: Instance, now: float) -> Order:
        instance.phase = Phase.FETCHING
        self._tickets += 1
        instance.ticket = self._tickets
        replay = None
        if instance.missing is not None:
            feed = instance.missing.feed
            replay = Replay(feed, instance.position.get(feed, 0))
        else:
            instance.partial = False
            instance.fetched_at = now
            instance.fetched_position = self.position
        return Order(instance.instance_id, instance.ticket, instance.reason, replay)

    def _check_lag(self, instance: Instance, now: float) -> None:
        lag = instance.lag
        if instance.phase is Phase.LIVE and lag is not None and now >= lag.since + self.limits.lag_s:
            self.want(instance, "lag", now, Missing(lag.feed, lag.seq))

    def _check_room(self, instance: Instance, now: float) -> None:
        if instance.phase is Phase.LIVE and instance.partial and instance.refill_at <= now:
            instance.refill_at = now + self.limits.refill_interval_s
            if self._ledger.content.entries <= self.limits.max_entries * self.limits.refill_ratio:
                self.want(instance, "room", now)

    # -- the outcome

    def replay(self, order: Order, batch: KvEvents, stream_seq: int, now: float) -> bool:
        """Take over a message that was read again. They may come in any order of the stream, but in that of their numbers.
        False: the replay is not wanted any more."""
        instance = self._fetching(order)
        if instance is None or order.replay is None:
            return False
        is_of_feed = FeedKey(batch.model, batch.tier) == order.replay.feed
        if is_of_feed and (batch.instance_id, batch.incarnation) == (instance.instance_id, instance.incarnation):
            self._ledger.advance(instance, batch, stream_seq, now)
        return True

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
                self._ledger.counts.events(Fate.TOO_MANY_FEEDS, "snapshot", 1)
                return True
            self._ledger.clear(chunk.model, owner)
            instance.snapshot[feed] = chunk.kv_seq
        elif instance.snapshot[feed] != chunk.kv_seq:
            self.fail(order, now)
            return False
        for chain in chunk.chains:
            if not is_chain(chain):
                self.fail(order, now)
                return False
            self._ledger.take(instance, chunk.model, owner, chain, now)
        return True

    def finish(self, order: Order, now: float) -> bool:
        """All that there was has been taken over. False: it is not wanted any more, or it was not enough."""
        instance = self._fetching(order)
        if instance is None:
            return False
        missing = instance.missing
        if missing is not None and instance.applied.get(missing.feed, 0) < missing.seq:
            self.want(instance, instance.reason, now)
            return False
        if missing is None:
            self._take_snapshot(instance)
        self._go_live(instance, now)
        return True

    def fail(self, order: Order, now: float) -> None:
        """It could not be fetched. After some failures what is known of the instance is given up as too old."""
        instance = self._fetching(order)
        if instance is None:
            return
        if order.replay is not None:
            self.want(instance, instance.reason, now)
            return
        instance.attempts += 1
        self.want(instance, instance.reason, now)
        delay = self.limits.repair_backoff_s * 2 ** min(instance.attempts - 1, 16)
        instance.not_before = now + min(delay, self.limits.repair_backoff_max_s)
        if instance.attempts == self.limits.repair_give_up:
            self._ledger.drop(instance.instance_id)

    def _take_snapshot(self, instance: Instance) -> None:
        for feed in instance.applied.keys() - instance.snapshot.keys():
            self._ledger.clear(feed.model, Owner(instance.instance_id, feed.tier))
        instance.applied, instance.snapshot = instance.snapshot, {}
        # Events behind the snapshot were sent after it was asked for, so they lie behind what was read then.
        instance.position = dict.fromkeys(instance.applied, instance.fetched_position)
        instance.attempts = 0

    def _go_live(self, instance: Instance, now: float) -> None:
        was_replay, instance.missing = instance.missing is not None, None
        self.attention = True
        instance.phase = Phase.LIVE
        buffer = instance.drop_buffer()
        if instance.overflowed:
            self.want(instance, "overflow", now)
        for batch, stream_seq in buffer:
            self.receive(instance, batch, stream_seq, now)
        self._end_lag(instance)
        lag = instance.lag
        if lag is not None:
            # What was reported before a snapshot was asked for is in it; what was reported since may be on its way.
            is_open = was_replay or lag.since > instance.fetched_at
            instance.lag = lag._replace(since=now) if is_open else None

    def _end_lag(self, instance: Instance) -> None:
        if instance.lag is not None and instance.applied.get(instance.lag.feed, 0) >= instance.lag.seq:
            instance.lag = None

    def _fetching(self, order: Order) -> Instance | None:
        instance = self._instances.get(order.instance_id)
        if instance is None or instance.phase is not Phase.FETCHING or instance.ticket != order.ticket:
            return None
        return instance
