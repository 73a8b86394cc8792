"""Which KV block holds what: free, in use, or kept for reuse. Pure bookkeeping over block numbers.

Every block is in exactly one state:

    state     key   refs   may be taken by
    free      no    0      allocate
    private   no    >0     nobody: a sequence fills it
    shared    yes   >0     nobody: sequences read it (and its ancestors, which they hold, too)
    cached    yes   0      allocate, which evicts it: the least worth keeping first (`EvictionOrder`), leaves before parents

Invariant: the parent of a keyed block is keyed and present, so a present block implies its whole prefix is. A referenced block's
ancestors are referenced, hence every cached block is reachable by evicting leaves.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import PLAIN, Directive, EvictionOrder, PinCaps, apply
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored


class _Block:
    """A `kvbus_blocks.retention.Node`, for `EvictionOrder`."""

    __slots__ = ("children", "depth", "directive", "inflation", "key", "number", "parent", "refs", "used", "uses")

    def __init__(self, number: int) -> None:
        self.number = number
        self.key: bytes | None = None
        self.parent: int | None = None  # block number; None: the root
        self.depth = 0
        self.children = 0  # keyed blocks right below this one
        self.refs = 0
        self.directive = PLAIN
        self.used = 0
        self.uses = 0
        self.inflation = 0.0

    @property
    def is_evictable(self) -> bool:
        return self.key is not None and self.refs == 0 and self.children == 0


class BlockPool:
    """``contains`` and ``directive`` may be asked from other threads; everything else belongs to one.

    ``now_s``: the time by which pins end, kept by the caller. ``pin_share``: part of the blocks that one tenant may pin.
    """

    def __init__(self, total: int, pin_share: float = 0.5) -> None:
        self.total = total
        self.now_s = 0.0
        self._pin_share = pin_share
        self._events = _EventLog()
        self._forget()

    def _forget(self) -> None:
        self._blocks = [_Block(number) for number in range(self.total)]
        self._by_key: dict[bytes, int] = {}
        self._free: dict[int, None] = dict.fromkeys(range(self.total))  # a set that remembers the order
        self._order: EvictionOrder[_Block] = EvictionOrder(lambda: len(self._by_key))
        self._pins = PinCaps(self.total, self._pin_share)
        self._cached = 0

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
        return PLAIN if number is None else self._blocks[number].directive

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
            if directive is not None or block.directive is not PLAIN:
                self._say(block, block.directive, directive or PLAIN)

    def _say(self, block: _Block, held: Directive | None, said: Directive) -> None:
        block.directive, _ = apply(self._pins, block.key, held, said, self.now_s)

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
        if said is not None:
            self._say(block, None, said)
        if parent != ROOT:
            above = self._blocks[self._by_key[parent]]
            above.children += 1
            block.parent = above.number
            block.depth = above.depth + 1
        self._by_key[key] = number
        self._events.stored(parent, key, tokens)
        return number

    def release(self, blocks: Sequence[int], unused: int = 0) -> None:
        """Drop one reference of each; ``blocks`` in chain order. All are equally recent then; the first ``unused`` ones were only
        held and are what they were."""
        self._order.begin_use()
        for index in reversed(range(len(blocks))):
            block = self._blocks[blocks[index]]
            block.refs -= 1
            if block.key is None:
                if not block.refs:
                    self._free[block.number] = None
                continue
            self._cached += not block.refs
            if index < unused:
                self._order.offer(block)
            else:
                self._order.use(block)

    def drop(self, keys: Collection[bytes]) -> int:
        """Free these blocks, children first; those in use and those with others below them stay. How many were freed."""
        wanted = {self._by_key[key] for key in keys if key in self._by_key}
        leaves = [block for number in wanted if (block := self._blocks[number]).is_evictable]
        dropped = 0
        while leaves:
            block = leaves.pop()
            self._remove(block)
            dropped += 1
            if block.parent in wanted and self._blocks[block.parent].is_evictable:
                leaves.append(self._blocks[block.parent])
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
        victim = self._order.pop(self.now_s)
        if victim is None:
            raise AssertionError("a cached block can never be evicted")
        self._remove(victim)

    def _remove(self, block: _Block) -> None:
        """A leaf becomes free."""
        if block.key is None:
            return
        del self._by_key[block.key]
        self._events.removed(block.key)
        self._pins.forget(block.key)
        block.key = None  # it may still be in the order
        self._blocks[block.number] = _Block(block.number)
        self._cached -= 1
        self._free[block.number] = None
        if block.parent is not None:
            above = self._blocks[block.parent]
            above.children -= 1
            self._order.offer(above)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not agree."""
        children = [0] * self.total
        cached = 0
        offered = self._order.offered()
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
                _check(block.depth == parent.depth + 1, f"block {number} does not know where it lies")
                _check(parent.refs > 0 or block.refs == 0, f"block {number} is held but its parent is not")
                children[block.parent] += 1
            if block.refs == 0:
                cached += 1
                if block.children == 0:
                    _check(block in offered, f"leaf {number} can never be evicted")
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
