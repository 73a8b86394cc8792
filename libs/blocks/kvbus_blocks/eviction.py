"""In which order cached blocks go: least recently used first, leaves before parents, pinned ones never.

A parent that goes before its child leaves a block that no prompt can reach; so only leaves are candidates.
"""

# ruff: noqa: S101 (check_integrity consists of assertions)
import heapq
from collections.abc import Iterable

from kvbus_blocks.keys import ROOT


class _Block:
    __slots__ = ("parent", "pins", "used")

    def __init__(self, parent: bytes, used: int) -> None:
        self.parent = parent
        self.used = used
        self.pins = 0


class EvictionOrder:
    """The blocks of one pool. Each call is O(log n) amortised; time is the order of the calls."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        # How many known blocks name this key as their parent, whether or not it is known itself.
        self._children: dict[bytes, int] = {}
        # (used, key) of candidates. An entry whose block was used, pinned or extended since is skipped when it comes up.
        self._candidates: list[tuple[int, bytes]] = []
        self._pinned = 0
        self._now = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def evictable(self) -> int:
        """Blocks that repeated `evict` can free: exact when whoever pins a block pins its parents, too (else an upper bound)."""
        return len(self._blocks) - self._pinned

    def insert(self, key: bytes, parent: bytes = ROOT) -> None:
        """A new block, used just now. The parent need not be known. Raise KeyError when the block is known already."""
        if key in self._blocks:
            raise KeyError(key)
        self._now += 1
        self._blocks[key] = _Block(parent, self._now)
        if parent != ROOT:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._offer(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """The blocks were used just now; unknown ones are ignored. Touch whole chains: then no parent is older than its child."""
        self._now += 1
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.used != self._now:
                block.used = self._now
                self._offer(key)

    def pin(self, key: bytes) -> None:
        """Keep the block until `unpin` was called as often. Raise KeyError for an unknown block."""
        block = self._blocks[key]
        self._pinned += not block.pins
        block.pins += 1

    def unpin(self, key: bytes) -> None:
        """Raise KeyError for an unknown block, ValueError when it is not pinned."""
        block = self._blocks[key]
        if not block.pins:
            raise ValueError("the block is not pinned")
        block.pins -= 1
        if not block.pins:
            self._pinned -= 1
            self._offer(key)

    def is_pinned(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.pins > 0

    def evict(self) -> bytes | None:
        """Remove and return the least recently used leaf that is not pinned, or None when there is none."""
        while self._candidates:
            used, key = heapq.heappop(self._candidates)
            block = self._blocks.get(key)
            if block is not None and block.used == used and self._is_candidate(key, block):
                self._forget(key, block)
                return key
        return None

    def discard(self, key: bytes) -> bool:
        """Remove a block for another reason, pinned or not; its children stay. Returns whether it was known."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._pinned -= block.pins > 0
        self._forget(key, block)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            if block.parent != ROOT:
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children, "child counts are off"
        assert self._pinned == sum(block.pins > 0 for block in self._blocks.values()), "the pin count is off"
        offered = set(self._candidates)
        for key, block in self._blocks.items():
            assert not self._is_candidate(key, block) or (block.used, key) in offered, "a candidate was never offered"
        assert len(self._candidates) <= self._max_candidates(), "stale candidates pile up"

    def _is_candidate(self, key: bytes, block: _Block) -> bool:
        return not block.pins and key not in self._children

    def _offer(self, key: bytes) -> None:
        block = self._blocks[key]
        if not self._is_candidate(key, block):
            return
        heapq.heappush(self._candidates, (block.used, key))
        self._compact()

    def _compact(self) -> None:
        if len(self._candidates) > self._max_candidates():
            self._candidates = [(b.used, k) for k, b in self._blocks.items() if self._is_candidate(k, b)]
            heapq.heapify(self._candidates)

    def _max_candidates(self) -> int:
        return 2 * len(self._blocks) + 64

    def _forget(self, key: bytes, block: _Block) -> None:
        del self._blocks[key]
        self._compact()
        if block.parent == ROOT:
            return
        left = self._children[block.parent] - 1
        if left:
            self._children[block.parent] = left
            return
        del self._children[block.parent]
        if block.parent in self._blocks:
            self._offer(block.parent)
