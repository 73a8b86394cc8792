"""Answers to "which blocks do you hold?", in chunks that all show the state at one event number."""

from collections.abc import Callable, Sequence

import msgspec

from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import pack_keys
from kvbus_wire.worker import BlockSnapshot, SnapshotChain
from kvbus_worker.engines.base import EngineError

Links = Sequence[tuple[bytes, bytes]]


class SnapshotPart(msgspec.Struct, frozen=True):
    snapshot_id: str
    kv_seq: int
    chains: tuple[SnapshotChain, ...]
    next_cursor: int | None


class _Held(msgspec.Struct):
    links: Links
    kv_seq: int
    expires_at: float


class Snapshots:
    """Holds at most ``limit`` snapshots, each for ``ttl_s`` after its last chunk; the oldest makes room for a new one."""

    def __init__(self, *, limit: int, ttl_s: float, chunk_blocks: int) -> None:
        self._limit = limit
        self.ttl_s = ttl_s
        self._chunk_blocks = chunk_blocks
        self._held: dict[str, _Held] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._held)

    def answer(self, request: BlockSnapshot, take: Callable[[], tuple[Links, int]], now: float) -> SnapshotPart:
        """``take`` yields the links and the number of the last event they include. Raise EngineError (gone)."""
        self.expire(now)
        snapshot_id, cursor = request.snapshot_id, request.cursor
        if not snapshot_id:
            cursor = 0
            self._made += 1
            snapshot_id = f"s{self._made}"
            links, kv_seq = take()
            while len(self._held) >= self._limit:
                del self._held[next(iter(self._held))]
            self._held[snapshot_id] = _Held(links, kv_seq, 0.0)
        held = self._held.get(snapshot_id)
        if held is None:
            raise EngineError(ErrorCode.GONE, "the snapshot has expired: begin a new one", retryable=True)
        if not 0 <= cursor <= len(held.links):
            raise EngineError(ErrorCode.INVALID_REQUEST, "the cursor is outside of the snapshot", param="cursor")
        end = min(cursor + self._chunk_blocks, len(held.links))
        held.expires_at = now + self.ttl_s
        # The last chunk may be asked for again: a reply can be lost.
        next_cursor = end if end < len(held.links) else None
        return SnapshotPart(snapshot_id, held.kv_seq, _chains(held.links[cursor:end]), next_cursor)

    def expire(self, now: float) -> None:
        for snapshot_id in [s for s, held in self._held.items() if held.expires_at <= now]:
            del self._held[snapshot_id]


def _chains(links: Links) -> tuple[SnapshotChain, ...]:
    """Runs of blocks that follow each other."""
    runs: list[tuple[bytes, list[bytes]]] = []
    for key, parent in links:
        if runs and runs[-1][1][-1] == parent:
            runs[-1][1].append(key)
        else:
            runs.append((parent, [key]))
    return tuple(SnapshotChain(parent=parent, keys=pack_keys(keys)) for parent, keys in runs)
