"""What waits to be written through to kvbm: newly stored blocks, oldest first, in chains."""

from collections import deque
from collections.abc import Container, Sequence

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_worker.engines.base import BlocksStored


class OffloadBatch(msgspec.Struct, frozen=True):
    """Blocks that follow each other below ``parent``."""

    parent: bytes
    keys: tuple[bytes, ...]


class OffloadQueue:
    """Bounded: a new block pushes the oldest one out. A block that is not written through costs a recompute, later, at worst.

    ``dropped``: pushed out; ``evicted``: gone from G1 before their turn came.
    """

    def __init__(self, *, limit_blocks: int, batch_blocks: int) -> None:
        self._limit = limit_blocks
        self.batch_blocks = batch_blocks
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self.dropped = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, stored: BlocksStored, skip: Container[bytes] = ()) -> None:
        """Queue the blocks of an event, but not those in ``skip``: kvbm has them."""
        parent = stored.parent
        for key in stored.keys:
            if key not in skip:
                self._waiting.append((parent, key))
            parent = key
        while len(self._waiting) > self._limit:
            self._waiting.popleft()
            self.dropped += 1

    def offer(self, links: Sequence[tuple[bytes, bytes]]) -> None:
        """Start anew with (key, parent) of blocks that lie in G1, as many as fit."""
        self._waiting.clear()
        self._waiting.extend((parent, key) for key, parent in links[: self._limit])

    def push_chain(self, keys: Sequence[bytes]) -> None:
        """Queue a whole chain from the root."""
        self.push(BlocksStored(ROOT, tuple(keys), ()))

    def put_back(self, batch: OffloadBatch) -> None:
        """What was taken last, in front: nobody had time for it."""
        links = list(zip((batch.parent, *batch.keys), batch.keys, strict=False))
        kept = links[max(0, len(links) + len(self._waiting) - self._limit) :]
        self.dropped += len(links) - len(kept)
        self._waiting.extendleft(reversed(kept))

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, present: Container[bytes]) -> OffloadBatch | None:
        """The next chain of at most ``batch_blocks`` blocks, without those that left G1 meanwhile (not in ``present``)."""
        first: bytes | None = None
        keys: list[bytes] = []
        while self._waiting and len(keys) < self.batch_blocks:
            parent, key = self._waiting[0]
            if key in present:
                if keys and keys[-1] != parent:
                    break
                if first is None:
                    first = parent
                keys.append(key)
            else:
                self.evicted += 1
            self._waiting.popleft()
        return OffloadBatch(first, tuple(keys)) if first is not None else None
