"""Which KV block holds what: free, in use, or kept for reuse. Pure bookkeeping over block numbers.

Every block is in exactly one state:

    state     key   refs   may be taken by
    free      no    0      allocate
    private   no    >0     nobody: a sequence fills it
    shared    yes   >0     nobody: sequences read it (and its ancestors, which they hold, too)
    cached    yes   0      allocate, which evicts it: least recently used first, leaves before parents

Invariant: the parent of a keyed block is keyed and present, so a present block implies its whole prefix is. A referenced block's
ancestors are referenced, hence every cached block is reachable by evicting leaves.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored
from kvbus_worker.engines.merging import merged

_DEFAULT = Directive()


class _Block:
    __slots__ = ("children", "directive", "key", "parent", "refs", "released")

    def __init__(self) -> None:
        self.directive = _DEFAULT
        self.key: bytes | None = None
        self.parent: int | None = None  # block number; None: the root
        self.children = 0  # keyed blocks right below this one
        self.refs = 0
        self.released = 0  # when refs became 0, in ticks


class BlockPool:
    """``contains`` and ``directive`` may be asked from other threads; everything else belongs to one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._events = _EventLog()
        self._forget()

    def _forget(self) -> None:
        self._blocks = [_Block() for _ in range(self.total)]
        self._by_key: dict[bytes, int] = {}
        self._free: dict[int, None] = dict.fromkeys(range(self.total))  # a set that remembers the order
        self._leaves: list[tuple[int, int]] = []  # heap of (released, block); stale entries are skipped
        self._cached = 0
        self._tick = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + self._cached

    @property
    def used(self) -> int:
        return self.total - self.available

    def contains(self, key: bytes) -> bool:
        return key in self._by_key

    def directive(self, key: bytes) -> Directive:
        """What holds for a block; the default when it is not there. May be asked from other threads."""
        number = self._by_key.get(key)
        return _DEFAULT if number is None else self._blocks[number].directive

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest present beginning of the chain."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody references: acquiring them lowers `available` by that."""
        return sum(self._blocks[block].refs == 0 for block in blocks)

    def count_freed(self, tables: Iterable[Sequence[int]], needed: Sequence[int]) -> int:
        """By how much `available` would grow if ``tables`` were released, ``needed`` (keyed blocks) being held."""
        released = Counter(block for table in tables for block in table)
        kept = set(needed)
        return sum(self._blocks[block].refs == count and block not in kept for block, count in released.items())

    def acquire(self, blocks: Iterable[int]) -> None:
        """Reference keyed blocks; of a chain always from the root on."""
        for number in blocks:
            block = self._blocks[number]
            if block.refs == 0:
                self._cached -= 1
            block.refs += 1

    def use(self, blocks: Sequence[int], said: Sequence[Directive | None]) -> None:
        """A request, which says this of them, makes use of keyed blocks."""
        for number, directive in zip(blocks, said, strict=True):
            block = self._blocks[number]
            block.directive = merged(block.directive, directive)

    def acquire_chain(self, key: bytes) -> list[int]:
        """Reference the keyed block and its ancestors, and return them root first. Raise KeyError when it is not there."""
        chain: list[int] = []
        number: int | None = self._by_key[key]
        while number is not None:
            chain.append(number)
            number = self._blocks[number].parent
        chain.reverse()
        self.acquire(chain)
        return chain

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """``count`` private blocks with one reference each; needs ``count <= available``.

        Takes neighbours of block ``after`` where they are free: adjacent blocks are read without being gathered.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} available")
        taken: list[int] = []
        for _ in range(count):
            number = self._take_free(after)
            self._blocks[number].refs = 1
            taken.append(number)
            after = number
        return taken

    def register(self, number: int, key: bytes, parent: bytes, tokens: bytes, said: Directive | None = None) -> int:
        """Give the caller's private block its key, and return the block to use from now on.

        When an equal block is there already, the caller's reference moves to it and its own block becomes free.
        """
        present = self._by_key.get(key)
        if present is not None:
            self.acquire([present])
            self.use([present], [said])
            self.release([number])
            return present
        block = self._blocks[number]
        block.key = key
        block.directive = merged(None, said)
        if parent != ROOT:
            block.parent = self._by_key[parent]
            self._blocks[block.parent].children += 1
        self._by_key[key] = number
        self._events.stored(parent, key, tokens)
        return number

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; ``blocks`` in chain order, so that the deepest become the oldest."""
        for number in reversed(blocks):
            block = self._blocks[number]
            block.refs -= 1
            if block.refs:
                continue
            if block.key is None:
                self._free[number] = None
                continue
            self._tick += 1
            block.released = self._tick
            self._cached += 1
            self._push_leaf(number)

    def drop(self, keys: Collection[bytes]) -> int:
        """Free these blocks, children first; those in use and those with others below them stay. How many were freed."""
        wanted = {self._by_key[key] for key in keys if key in self._by_key}
        leaves = [number for number in wanted if self._is_leaf(self._blocks[number])]
        dropped = 0
        while leaves:
            number = leaves.pop()
            parent = self._blocks[number].parent
            self._remove(number)
            dropped += 1
            if parent is not None and parent in wanted and self._is_leaf(self._blocks[parent]):
                leaves.append(parent)
        return dropped

    def clear(self) -> None:
        """Forget everything, references included."""
        if self._by_key:
            self._events.cleared()
        self._forget()

    def take_events(self) -> tuple[BlockEvent, ...]:
        """What happened to keyed blocks since the last call, in order."""
        return self._events.take()

    def _take_free(self, after: int | None) -> int:
        if not self._free:
            self._evict()
        number = -1 if after is None else after + 1
        if number not in self._free:
            number = next(iter(self._free))
        del self._free[number]
        return number

    def _evict(self) -> None:
        while True:
            released, number = heapq.heappop(self._leaves)
            block = self._blocks[number]
            if self._is_leaf(block) and block.released == released:
                self._remove(number)
                return

    def _remove(self, number: int) -> None:
        """A leaf becomes free."""
        block = self._blocks[number]
        if block.key is not None:  # every leaf has one
            del self._by_key[block.key]
            self._events.removed(block.key)
        self._blocks[number] = _Block()
        self._cached -= 1
        self._free[number] = None
        if block.parent is not None:
            self._blocks[block.parent].children -= 1
            self._push_leaf(block.parent)

    @staticmethod
    def _is_leaf(block: _Block) -> bool:
        return block.key is not None and block.refs == 0 and block.children == 0

    def _push_leaf(self, number: int) -> None:
        block = self._blocks[number]
        if not self._is_leaf(block):
            return
        if len(self._leaves) > 2 * self.total:  # drop the stale ones
            leaves = ((b.released, i) for i, b in enumerate(self._blocks) if self._is_leaf(b) and i != number)
            self._leaves = list(leaves)
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.released, number))

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not agree."""
        children = [0] * self.total
        cached = 0
        candidates = set(self._leaves)
        for number, block in enumerate(self._blocks):
            if number in self._free:
                _check(block.key is None and block.refs == 0, f"free block {number} is in use")
                continue
            if block.key is None:
                _check(block.refs > 0, f"block {number} is lost")
                continue
            _check(self._by_key.get(block.key) == number, f"block {number} is not found by its key")
            if block.parent is not None:
                parent = self._blocks[block.parent]
                _check(parent.key is not None, f"the parent of block {number} is gone")
                _check(parent.refs > 0 or block.refs == 0, f"block {number} is held but its parent is not")
                children[block.parent] += 1
            if block.refs == 0:
                cached += 1
                if block.children == 0:
                    _check((block.released, number) in candidates, f"leaf {number} can never be evicted")
        _check(cached == self._cached, f"{self._cached} cached blocks counted, {cached} found")
        _check(children == [block.children for block in self._blocks], "children are miscounted")
        _check(len(self._by_key) == sum(b.key is not None for b in self._blocks), "a key names no block")


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


class _EventLog:
    """Block events in order; what continues the last event is merged into it."""

    def __init__(self) -> None:
        self._done: list[BlockEvent] = []
        self._parent = ROOT
        self._stored: list[tuple[bytes, bytes]] = []
        self._removed: list[bytes] = []

    def stored(self, parent: bytes, key: bytes, tokens: bytes) -> None:
        if self._removed or not self._stored or self._stored[-1][0] != parent:
            self._flush()
            self._parent = parent
        self._stored.append((key, tokens))

    def removed(self, key: bytes) -> None:
        if self._stored:
            self._flush()
        self._removed.append(key)

    def cleared(self) -> None:
        self._flush()
        self._done.append(BlocksCleared())

    def take(self) -> tuple[BlockEvent, ...]:
        self._flush()
        events, self._done = tuple(self._done), []
        return events

    def _flush(self) -> None:
        if self._stored:
            keys, tokens = zip(*self._stored, strict=True)
            self._done.append(BlocksStored(self._parent, keys, tokens))
            self._stored = []
        if self._removed:
            self._done.append(BlocksRemoved(tuple(self._removed)))
            self._removed = []
