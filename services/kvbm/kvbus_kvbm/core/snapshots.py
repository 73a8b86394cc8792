"""Answers to "which blocks do you hold?", in chunks that fit into a message."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_kvbm.core.errors import SnapshotGone
from kvbus_wire.worker import SnapshotChain


class Chunk(msgspec.Struct, frozen=True):
    """``kv_seq``: number of the last event that the whole snapshot includes."""

    snapshot_id: str
    model: str
    kv_seq: int
    chains: tuple[SnapshotChain, ...]
    next_cursor: int | None


class _Snapshot(msgspec.Struct):
    model: str
    kv_seq: int
    chunks: list[tuple[SnapshotChain, ...]]
    asked_s: float


class Snapshots:
    """Keeps the chunks of a snapshot until they are fetched, or ``ttl_s`` after the last question, or for want of room."""

    def __init__(self, *, chunk_keys: int, max_snapshots: int, ttl_s: float, new_id: Callable[[], str]) -> None:
        self._chunk_keys = chunk_keys
        self._max_snapshots = max_snapshots
        self._ttl_s = ttl_s
        self._new_id = new_id
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def first(self, model: str, kv_seq: int, chains: Iterable[SnapshotChain], now_s: float) -> Chunk:
        """Take a snapshot and return its first chunk."""
        self.expire(now_s)
        snapshot_id = self._new_id()
        chunks = _chunks(chains, self._chunk_keys)
        self._snapshots[snapshot_id] = _Snapshot(model, kv_seq, chunks, now_s)
        while len(self._snapshots) > self._max_snapshots:
            self._snapshots.popitem(last=False)
        return self.chunk(snapshot_id, 0, now_s)

    def chunk(self, snapshot_id: str, cursor: int, now_s: float) -> Chunk:
        """A chunk by its number. Raise SnapshotGone: the asker has to begin again."""
        self.expire(now_s)
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None or not 0 <= cursor < len(snapshot.chunks):
            raise SnapshotGone(f"snapshot {snapshot_id} has no chunk {cursor} any more")
        snapshot.asked_s = now_s
        self._snapshots.move_to_end(snapshot_id)
        more = cursor + 1 < len(snapshot.chunks)
        if len(snapshot.chunks) == 1:
            del self._snapshots[snapshot_id]  # a longer one stays: the answer to its last question may be lost
        return Chunk(
            snapshot_id, snapshot.model, snapshot.kv_seq, snapshot.chunks[cursor], cursor + 1 if more else None
        )

    def expire(self, now_s: float) -> None:
        while self._snapshots:
            snapshot_id, snapshot = next(iter(self._snapshots.items()))
            if snapshot.asked_s + self._ttl_s > now_s:
                return
            del self._snapshots[snapshot_id]

    def next_due_s(self) -> float | None:
        return next((snapshot.asked_s + self._ttl_s for snapshot in self._snapshots.values()), None)


def _chunks(chains: Iterable[SnapshotChain], chunk_keys: int) -> list[tuple[SnapshotChain, ...]]:
    """Chains in groups of at most ``chunk_keys`` keys, longer ones cut. Always at least one chunk."""
    chunks: list[tuple[SnapshotChain, ...]] = []
    chunk: list[SnapshotChain] = []
    room = chunk_keys
    for chain in chains:
        parent, keys = chain.parent, chain.keys
        while keys:
            piece, keys = keys[: room * KEY_BYTES], keys[room * KEY_BYTES :]
            chunk.append(SnapshotChain(parent=parent, keys=piece))
            parent = piece[-KEY_BYTES:]
            room -= len(piece) // KEY_BYTES
            if not room:
                chunks.append(tuple(chunk))
                chunk, room = [], chunk_keys
    if chunk or not chunks:
        chunks.append(tuple(chunk))
    return chunks
