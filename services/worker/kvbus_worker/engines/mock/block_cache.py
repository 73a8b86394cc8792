"""G1 of the mock: which blocks are held, by whom, and who goes first.

A block is *private* (being filled by one sequence; it has no key), *referenced* (cached and used by running sequences) or *idle*
(cached, no user: evictable). Room is counted, there is no memory behind it. An idle block is evicted only when no cached block
follows it, so a chain always loses its end first and "block i is there" implies that its prefix is.

    free room = capacity - private - cached        available room = free room + idle
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_worker.engines.base import BlockEvent, BlocksRemoved, BlocksStored


class _Block(msgspec.Struct):
    parent: bytes
    tokens: bytes
    users: int = 0
    children: int = 0
    last_used: int = 0


class _Run(msgspec.Struct):
    """A block event under construction: consecutive keys of one chain stored, or any keys removed."""

    stored: bool
    parent: bytes = ROOT
    keys: list[bytes] = []
    tokens: list[bytes] = []


class BlockCache:
    """Pure bookkeeping. Changes of what is cached are collected as block events until `take_events`."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a block cache needs room for at least one block")
        self.capacity = capacity
        self._blocks: dict[bytes, _Block] = {}
        self._private = 0
        self._idle = 0
        self._tick = 0
        # (last_used, key) of idle leaves; entries whose block was used or gained a child since are stale and skipped.
        self._evictable: list[tuple[int, bytes]] = []
        self._runs: list[_Run] = []

    @property
    def available(self) -> int:
        return self.capacity - self._private - len(self._blocks) + self._idle

    @property
    def in_use(self) -> int:
        """Private and referenced blocks."""
        return self._private + len(self._blocks) - self._idle

    @property
    def cached(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are cached."""
        for depth, key in enumerate(keys):
            if key not in self._blocks:
                return depth
        return len(keys)

    def acquire(self, keys: Sequence[bytes]) -> int:
        """Reference the leading cached blocks; how many."""
        depth = self.leading(keys)
        for key in keys[:depth]:
            self._reference(self._blocks[key])
        return depth

    def release(self, keys: Sequence[bytes]) -> None:
        """Give up references. All of one chain get the same age, so that its end is evicted before its beginning."""
        self._tick += 1
        for key in reversed(keys):
            block = self._blocks[key]
            block.users -= 1
            block.last_used = self._tick
            if block.users == 0:
                self._idle += 1
                self._offer(key, block)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def allocate(self, count: int) -> None:
        """Take private blocks, evicting idle ones. Call only after `can_allocate`."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        self._make_room(count)
        self._private += count

    def free(self, count: int) -> None:
        """Give private blocks back."""
        self._private -= count

    def publish(self, parent: bytes, key: bytes, tokens: bytes) -> None:
        """A private block is full: it becomes cached, referenced by its owner. An equal block that is there is used instead.

        ``parent`` must be referenced by the caller (or the root).
        """
        self._private -= 1
        block = self._blocks.get(key)
        if block is not None:
            self._reference(block)
            return
        self._insert(parent, key, tokens, users=1)

    def adopt(self, parent: bytes, keys: Sequence[bytes], tokens: Sequence[bytes]) -> int:
        """Cache blocks from elsewhere, idle; how many leading ones are cached afterwards. Takes only available room."""
        if parent != ROOT and parent not in self._blocks:
            return self.leading(keys)
        # Neither the chain up to the parent nor what is adopted may be evicted to make room for the rest of the chain.
        held = self._chain_to(parent)
        above = len(held)
        for key in held:
            self._reference(self._blocks[key])
        for key, packed in zip(keys, tokens, strict=True):
            block = self._blocks.get(key)
            if block is not None:
                self._reference(block)
            elif self.can_allocate(1):
                self._make_room(1)
                self._insert(parent, key, packed, users=1)
            else:
                break
            held.append(key)
            parent = key
        self.release(held)
        return len(held) - above

    def _chain_to(self, key: bytes) -> list[bytes]:
        chain: list[bytes] = []
        while key != ROOT:
            chain.append(key)
            key = self._blocks[key].parent
        chain.reverse()
        return chain

    def take_events(self) -> tuple[BlockEvent, ...]:
        runs, self._runs = self._runs, []
        return tuple(
            BlocksStored(run.parent, tuple(run.keys), tuple(run.tokens))
            if run.stored
            else BlocksRemoved(tuple(run.keys))
            for run in runs
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            children[block.parent] = children.get(block.parent, 0) + 1
            if block.parent != ROOT and block.parent not in self._blocks:
                raise AssertionError("a cached block has lost its parent")
        idle = sum(block.users == 0 for block in self._blocks.values())
        if idle != self._idle:
            raise AssertionError(f"{idle} idle blocks, {self._idle} counted")
        for key, block in self._blocks.items():
            if block.children != children.get(key, 0) or block.users < 0:
                raise AssertionError("the children or users of a block are miscounted")
        if self._private < 0 or self._private + len(self._blocks) > self.capacity:
            raise AssertionError("the capacity is exceeded")
        valid = {key for stamp, key in self._evictable if self._is_evictable(stamp, key)}
        if any(block.users == 0 and block.children == 0 and key not in valid for key, block in self._blocks.items()):
            raise AssertionError("an idle leaf cannot be evicted")

    def _reference(self, block: _Block) -> None:
        if block.users == 0:
            self._idle -= 1
        block.users += 1

    def _insert(self, parent: bytes, key: bytes, tokens: bytes, *, users: int) -> None:
        self._blocks[key] = _Block(parent, tokens, users=users)
        if parent != ROOT:
            self._blocks[parent].children += 1
        last = self._runs[-1] if self._runs else None
        if last is None or not last.stored or last.keys[-1] != parent:
            last = _Run(stored=True, parent=parent)
            self._runs.append(last)
        last.keys.append(key)
        last.tokens.append(tokens)

    def _make_room(self, count: int) -> None:
        while self.capacity - self._private - len(self._blocks) < count:
            stamp, key = heappop(self._evictable)
            if self._is_evictable(stamp, key):
                self._evict(key)

    def _evict(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        self._idle -= 1
        if block.parent != ROOT:
            parent = self._blocks[block.parent]
            parent.children -= 1
            if parent.users == 0:
                self._offer(block.parent, parent)
        last = self._runs[-1] if self._runs else None
        if last is None or last.stored:
            last = _Run(stored=False)
            self._runs.append(last)
        last.keys.append(key)

    def _offer(self, key: bytes, block: _Block) -> None:
        if block.children == 0:
            heappush(self._evictable, (block.last_used, key))
            if len(self._evictable) > 4 * self.capacity + 64:
                self._evictable = sorted({entry for entry in self._evictable if self._is_evictable(*entry)})

    def _is_evictable(self, stamp: int, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.users == 0 and block.children == 0 and block.last_used == stamp
