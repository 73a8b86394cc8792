"""The indexer's whole state: who is there, what they hold, and whether that can be trusted.

Content exists only for instances that the directory knows, and only of their newest incarnation. Events apply in order (`ledger`);
whatever is missing (a gap, an event of an instance not in the directory yet, a worker that has sent more than arrived, a join) is
repaired (`repairs`). What routing decisions let expect (`predictions`) is kept apart from what events say.
"""

from collections.abc import Callable, Sequence

from kvbus_blocks.index import Held, Owner, PrefixIndex
from kvbus_blocks.keys import KEY_BYTES
from kvbus_indexer.core.content import Content
from kvbus_indexer.core.fates import Counts, Fate, NoCounts, count_events
from kvbus_indexer.core.instance import FeedKey, Instance, Lag, Phase
from kvbus_indexer.core.ledger import G1, Ledger, is_valid
from kvbus_indexer.core.limits import Limits
from kvbus_indexer.core.predictions import Ending, Predictions
from kvbus_indexer.core.repairs import Repairs
from kvbus_indexer.core.sources import Silence
from kvbus_wire.indexer import Match
from kvbus_wire.kv_events import KvEvents
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import short_keys
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, Progress


class Catalog:
    """Times are monotonic seconds. Nothing is repaired, and nothing should be asked, before `stream_caught_up`."""

    def __init__(
        self,
        limits: Limits,
        make_index: Callable[[], PrefixIndex],
        counts: Counts | None = None,
        prediction_ended: Callable[[Ending], None] = lambda _: None,
    ) -> None:
        self.limits = limits
        self.content = Content(make_index, limits.max_entries)
        self.predictions = Predictions(limits, make_index, prediction_ended)
        self._instances: dict[str, Instance] = {}
        self._counts = counts or NoCounts()
        self._ledger = Ledger(self.content, self.predictions, limits, self._counts)
        self.repairs = Repairs(self._instances, self._ledger, limits)

    @property
    def caught_up(self) -> bool:
        return self.repairs.running

    # -- the directory

    def joined(self, record: InstanceRecord, now: float) -> None:
        """A record is new or has changed."""
        if record.worker is None and record.kvbm is None:
            return
        instance = self._instances.get(record.instance_id)
        if instance is None:
            instance = self._instances[record.instance_id] = Instance(record)
        elif record.incarnation > instance.incarnation:
            # Nothing of the previous incarnation holds; a repair of it that is under way is void.
            self._ledger.drop(record.instance_id)
            instance = self._instances[record.instance_id] = Instance(record)
        else:
            return
        if self.caught_up and instance.has_events:
            # Its first events may have arrived before its record did, and were ignored then.
            self.repairs.want(instance, "joined", now)

    def left(self, instance_id: str) -> None:
        if self._instances.pop(instance_id, None) is not None:
            self._ledger.drop(instance_id)

    # -- the stream of events

    def delivered(self, stream_seq: int, now: float) -> None:
        """The stream has brought message ``stream_seq``, whatever is in it. Call it before `apply`."""
        position = self.repairs.position
        if (position or self.caught_up) and stream_seq > position + 1:
            # What lay between was purged or expired before it was read. Before anything was read it is the past, unless the
            # stream's end was reached without a message: what has come since then counts, even if it was the first.
            self._missed("stream_hole", now)
        self.repairs.position = stream_seq

    def apply(self, batch: KvEvents, now: float, stream_seq: int = 0) -> None:
        """``stream_seq``: where in the stream it is; without it nothing can be read from there again."""
        instance = self._instances.get(batch.instance_id)
        if instance is None or batch.incarnation > instance.incarnation:
            # The directory alone says who is there: a number from a wrong clock would shut out what really runs, for good.
            count_events(self._counts, Fate.UNKNOWN_INSTANCE, batch.events)
        elif batch.incarnation < instance.incarnation:
            count_events(self._counts, Fate.STALE, batch.events)
        elif not all(map(is_valid, batch.events)):
            count_events(self._counts, Fate.INVALID, batch.events)
            self.repairs.want(instance, "invalid", now)
        else:
            was_heard = instance.heard
            self.repairs.receive(instance, batch, stream_seq, now)
            if instance.heard and not was_heard:
                self.predictions.heard(instance.instance_id)

    def stream_caught_up(self, now: float) -> None:
        """All events that the stream held at the start were delivered. From here on, what is missing is repaired.

        A feed of which the stream holds nothing any more shows in no gap. Workers have one, and report its last event. What fills
        another instance's gap in one feed says nothing of its others.
        """
        self.repairs.running = self.repairs.attention = True
        for instance in self._instances.values():
            if instance.is_worker:
                may_lack_feeds = instance.phase is Phase.LIVE and instance.has_events and not instance.applied
            else:
                may_lack_feeds = not instance.restored and (instance.phase is Phase.LIVE or instance.keeps_events)
            if may_lack_feeds:
                self.repairs.want(instance, "unseen", now)

    def stream_replaced(self, now: float) -> None:
        """The stream is another one, and is read from its beginning: what was in the former one cannot be read again."""
        self.repairs.position = 0
        for instance in self._instances.values():
            instance.position.clear()
            instance.fetched_position = 0
        self._missed("stream_replaced", now)

    def reconnected(self, now: float) -> None:
        """The bus was away."""
        if self.caught_up:
            self._missed("reconnected", now)

    def _missed(self, reason: str, now: float) -> None:
        """Events may have been lost. A worker's lost last event shows in its load reports; others do not report any."""
        if not self.caught_up:
            self.forget()
            return
        for instance in self._instances.values():
            # Who is about to be asked for a snapshot need not be asked twice.
            if not instance.is_worker and (instance.phase is Phase.LIVE or instance.keeps_events):
                self.repairs.want(instance, reason, now)

    def load_report(self, report: LoadReport, now: float) -> None:
        """A worker that has sent more events than arrived gets a moment, then a repair."""
        instance = self._instances.get(report.instance_id)
        if instance is None or instance.incarnation != report.incarnation:
            return
        instance.source.report(report, now)
        if not self.caught_up:
            return
        feed = FeedKey(report.model, G1)
        if instance.lag is None and report.kv_seq > instance.applied.get(feed, 0):
            instance.lag = Lag(feed, report.kv_seq, now)
            self.repairs.attention = True

    # -- routing decisions

    def decided(self, decision: Decision, now: float) -> bool:
        """A router has sent a request to a worker. False: to one that is not there (any more)."""
        instance = self._instances.get(decision.worker_id)
        if instance is None or instance.incarnation != decision.incarnation or len(decision.keys) % KEY_BYTES:
            return False
        self.predictions.decided(
            decision.request_id,
            decision.worker_id,
            decision.model,
            short_keys(decision.keys),
            now,
            has_events=not self.limits.approximate or self.silence(instance, now) is None,
            capacity=instance.capacity,
        )
        return True

    def progress(self, progress: Progress, now: float) -> None:
        """Of a request that a router has placed."""
        match progress.phase:
            case "first_token":
                self.predictions.first_token(progress.request_id, now)
            case "finished":
                self.predictions.finished(progress.request_id)

    def silence(self, instance: Instance, now: float) -> Silence | None:
        """Why nothing is heard of a worker; None where that means nothing."""
        if not instance.is_worker:
            return None
        return instance.source.silence(heard=instance.heard, grace_s=self.limits.events_grace_s, now=now)

    def silent_workers(self, now: float) -> dict[str, Silence]:
        """Those that work and of whose blocks no events come."""
        found = ((instance.instance_id, self.silence(instance, now)) for instance in self.all_instances())
        return {instance_id: silence for instance_id, silence in found if silence is not None}

    # -- queries (the counts are also read by the thread that renders the metrics, hence the copies)

    def match(self, model: str, keys: Sequence[int], now: float) -> tuple[Match, ...]:
        """By events and, where that is more, by prediction."""
        found = self.content.match(model, keys)
        # A thousand may share a prompt: positions and one small dict where keywords and a `Depths` as dict take twice the time.
        told = [Match(owner.instance_id, owner.tier, depth) for owner, depth in found.items()]
        predicted = self.predictions.match(model, keys, now)
        in_g1 = {match.instance_id: match.depth for match in told if match.tier == G1} if predicted else {}
        more = [
            Match(worker_id, G1, depth, True)
            for worker_id, depth in predicted.items()
            if depth > in_g1.get(worker_id, 0)
        ]
        return (*more, *told)

    @property
    def instances(self) -> int:
        return len(self._instances)

    def instance(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    def all_instances(self) -> list[Instance]:
        """A copy of the list, not of the instances."""
        return list(self._instances.values())

    @property
    def partial_instances(self) -> int:
        return sum(instance.partial for instance in list(self._instances.values()))

    def held(self, instance: Instance, feed: FeedKey) -> Held:
        return self.content.held(feed.model, Owner(instance.instance_id, feed.tier))

    # -- restored content

    def begin_restore(self, position: int) -> None:
        """The content follows as it was when the stream had been handled up to ``position``."""
        self.repairs.position = position

    def restore(self, instance_id: str, incarnation: int, feed: FeedKey, kv_seq: int) -> bool:
        """A feed's content as of its event ``kv_seq`` will follow by `restore_chain`. False: it would be a ghost.

        Only before the stream is read, from the place behind which all further events are.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.incarnation != incarnation or self.caught_up or feed in instance.applied:
            return False
        instance.restored = True
        instance.applied[feed] = kv_seq
        instance.position[feed] = self.repairs.position
        return True

    def restore_chain(
        self, instance_id: str, feed: FeedKey, parent: int | None, keys: Sequence[int], now: float
    ) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None and feed in instance.applied:
            self._ledger.store(instance, feed.model, Owner(instance_id, feed.tier), parent, keys, now)

    def forget(self) -> None:
        """What was restored counts for nothing without all of the events behind it."""
        self.repairs.position = 0
        for instance in self._instances.values():
            self._ledger.drop(instance.instance_id)
            instance.applied.clear()
            instance.position.clear()
            instance.restored = instance.partial = False

    def check_integrity(self) -> None:
        self.predictions.check_integrity()
        self.content.check_integrity()
        for index in self.content.indexes.values():
            sizes = index.sizes()
            if sizes.orphans > sizes.entries:
                raise AssertionError("more orphans than entries")
            for owner in index.owners():
                if owner.instance_id not in self._instances:
                    raise AssertionError(f"{owner} is a ghost")
        for instance in self._instances.values():
            if instance.buffer and not instance.keeps_events:
                raise AssertionError("a buffer that nobody needs")
            if instance.snapshot and instance.phase is not Phase.FETCHING:
                raise AssertionError("a snapshot without a fetch")
            if instance.buffered_keys > self.limits.max_buffered_keys:
                raise AssertionError("the buffer is over its limit")
        if self.repairs.in_phase(Phase.FETCHING) > self.limits.max_repairs:
            raise AssertionError("too many repairs at once")
