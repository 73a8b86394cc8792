"""Enters what instances say into the content, in the order of their numbers, and counts what became of it.

Per instance and feed, of a batch with the numbers ``first_seq`` .. ``last_seq``:

    last_seq  <= applied        ignored: it was delivered twice
    first_seq <= applied + 1    applied, but for the part that was applied before
    first_seq >  applied + 1    a gap: nothing applies until it has been repaired
"""

from collections import Counter
from collections.abc import Sequence

from kvbus_blocks.index import Owner
from kvbus_blocks.keys import KEY_BYTES
from kvbus_indexer.core.content import Content
from kvbus_indexer.core.fates import Blocks, Counts, Fate, count_events, kind_of
from kvbus_indexer.core.instance import FeedKey, Instance
from kvbus_indexer.core.limits import Limits
from kvbus_indexer.core.predictions import Predictions
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.packing import short_key, short_keys
from kvbus_wire.worker import SnapshotChain

G1 = "g1"


def is_chain(chain: Stored | SnapshotChain) -> bool:
    """Whether the keys are whole."""
    return not len(chain.keys) % KEY_BYTES and len(chain.parent) in (0, KEY_BYTES)


def is_valid(event: KvEvent) -> bool:
    match event:
        case Stored():
            return is_chain(event)
        case Removed(keys):
            return not len(keys) % KEY_BYTES
        case Cleared():
            return True


class Ledger:
    """Knows nothing of phases: whoever calls it has decided that the batch or the chain counts."""

    def __init__(self, content: Content, predictions: Predictions, limits: Limits, counts: Counts) -> None:
        self.content = content
        self._predictions = predictions
        self.counts = counts
        self._limits = limits

    def advance(self, instance: Instance, batch: KvEvents, stream_seq: int, now: float) -> bool:
        """False: there is a gap before the batch. ``stream_seq``: its place in the stream."""
        feed = FeedKey(batch.model, batch.tier)
        applied = instance.applied.get(feed, 0)
        if batch.last_seq <= applied:
            count_events(self.counts, Fate.DUPLICATE, batch.events)
        elif batch.first_seq > applied + 1:
            count_events(self.counts, Fate.GAP, batch.events)
            return False
        elif feed not in instance.applied and len(instance.applied) >= self._limits.max_feeds_per_instance:
            count_events(self.counts, Fate.TOO_MANY_FEEDS, batch.events)
        else:
            known = applied + 1 - batch.first_seq
            count_events(self.counts, Fate.DUPLICATE, batch.events[:known])
            became = Counter(
                (self._apply(instance, batch, event, now), kind_of(event)) for event in batch.events[known:]
            )
            for (fate, kind), count in became.items():
                self.counts.events(fate, kind, count)
            instance.applied[feed] = batch.last_seq
            instance.position[feed] = max(stream_seq, instance.position.get(feed, 0))
            instance.heard = True
        return True

    def take(self, instance: Instance, model: str, owner: Owner, chain: Stored | SnapshotChain, now: float) -> Fate:
        """The owner holds the chain."""
        parent, keys = short_key(chain.parent) if chain.parent else None, short_keys(chain.keys)
        if owner.tier == G1:
            self._predictions.stored(owner.instance_id, keys)
        return self.store(instance, model, owner, parent, keys, now)

    def store(
        self, instance: Instance, model: str, owner: Owner, parent: int | None, keys: Sequence[int], now: float
    ) -> Fate:
        if instance.partial:
            self.counts.blocks(Blocks.REFUSED, len(keys))
            return Fate.APPLIED
        outcome = self.content.store(model, owner, parent, keys)
        self.counts.blocks(Blocks.ADDED, outcome.added)
        self.counts.blocks(Blocks.ORPHAN, outcome.orphans)
        self.counts.blocks(Blocks.COLLISION, outcome.collisions)
        if outcome.refused:
            self.counts.blocks(Blocks.REFUSED, outcome.refused)
            instance.partial = True
            instance.refill_at = now + self._limits.refill_interval_s
        return Fate.PARENT_NOT_FOUND if outcome.orphans else Fate.APPLIED

    def clear(self, model: str, owner: Owner) -> None:
        self.counts.blocks(Blocks.REMOVED, self.content.clear(model, owner))

    def drop(self, instance_id: str) -> None:
        self._predictions.drop(instance_id)
        self.counts.blocks(Blocks.REMOVED, self.content.drop(instance_id))

    def _apply(self, instance: Instance, batch: KvEvents, event: KvEvent, now: float) -> Fate:
        owner = Owner(batch.instance_id, batch.tier)
        match event:
            case Stored():
                return self.take(instance, batch.model, owner, event, now)
            case Removed(keys):
                self.counts.blocks(Blocks.REMOVED, self.content.remove(batch.model, owner, short_keys(keys)))
            case Cleared():
                self.clear(batch.model, owner)
                if batch.tier == G1:
                    self._predictions.drop(batch.instance_id)
        return Fate.APPLIED
