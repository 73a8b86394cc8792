"""Answers to "which blocks do you hold?", in chunks that fit into a message."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_kvbm.core.errors import SnapshotGone
from kvbus_wire.worker import SnapshotChain


class Feed(msgspec.Struct, frozen=True):
    """The blocks of one model and tier, and the number of the last event that they include."""

    model: str
    tier: str
    kv_seq: int
    chains: tuple[SnapshotChain, ...]


class Chunk(msgspec.Struct, frozen=True):
    """A piece of one feed. Each feed has at least one, so that its number is told even when it is empty."""

    snapshot_id: str
    feed: Feed
    next_cursor: int | None


class _Snapshot(msgspec.Struct):
    chunks: list[Feed]
    asked_s: float


class Snapshots:
    """Keeps a snapshot until ``ttl_s`` after the last question for it, or until ``max_snapshots`` younger ones were taken."""

    def __init__(self, *, chunk_keys: int, max_snapshots: int, ttl_s: float, new_id: Callable[[], str]) -> None:
        self._chunk_keys = chunk_keys
        self._max_snapshots = max_snapshots
        self._ttl_s = ttl_s
        self._new_id = new_id
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def take(self, feeds: Iterable[Feed], now_s: float) -> Chunk:
        """Take a snapshot of all feeds and return its first chunk."""
        self.expire(now_s)
        snapshot_id = self._new_id()
        chunks = [chunk for feed in feeds for chunk in _cut(feed, self._chunk_keys)] or [Feed("", "g2", 0, ())]
        if len(chunks) == 1:
            return Chunk(snapshot_id, chunks[0], None)
        self._snapshots[snapshot_id] = _Snapshot(chunks, now_s)
        while len(self._snapshots) > self._max_snapshots:
            self._snapshots.popitem(last=False)
        return self.chunk(snapshot_id, 0, now_s)

    def chunk(self, snapshot_id: str, cursor: int, now_s: float) -> Chunk:
        """A chunk by its number, as often as asked. Raise SnapshotGone: the asker has to begin again."""
        self.expire(now_s)
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None or not 0 <= cursor < len(snapshot.chunks):
            raise SnapshotGone(f"snapshot {snapshot_id} has no chunk {cursor} any more")
        snapshot.asked_s = now_s
        self._snapshots.move_to_end(snapshot_id)
        more = cursor + 1 < len(snapshot.chunks)
        return Chunk(snapshot_id, snapshot.chunks[cursor], cursor + 1 if more else None)

    def expire(self, now_s: float) -> None:
        while self._snapshots:
            snapshot_id, snapshot = next(iter(self._snapshots.items()))
            if snapshot.asked_s + self._ttl_s > now_s:
                return
            del self._snapshots[snapshot_id]

    def next_due_s(self) -> float | None:
        return next((snapshot.asked_s + self._ttl_s for snapshot in self._snapshots.values()), None)


def _cut(feed: Feed, chunk_keys: int) -> list[Feed]:
    """The feed's chains in groups of at most ``chunk_keys`` keys, longer ones cut."""
    groups: list[tuple[SnapshotChain, ...]] = []
    group: list[SnapshotChain] = []
    room = chunk_keys
    for chain in feed.chains:
        parent, keys = chain.parent, chain.keys
        while keys:
            piece, keys = keys[: room * KEY_BYTES], keys[room * KEY_BYTES :]
            group.append(SnapshotChain(parent=parent, keys=piece))
            parent = piece[-KEY_BYTES:]
            room -= len(piece) // KEY_BYTES
            if not room:
                groups.append(tuple(group))
                group, room = [], chunk_keys
    if group or not groups:
        groups.append(tuple(group))
    return [Feed(feed.model, feed.tier, feed.kv_seq, group) for group in groups]
