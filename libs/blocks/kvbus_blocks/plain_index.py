"""The prefix index in plain Python: the reference for every other one, and fast enough for a small cluster.

A set of owners is an int used as a bit mask. Each node knows who `held` it and for whom it is `reachable`, with these invariants:

    reachable is a subset of held
    reachable(node) == held(node)                      when the parent is the root
                    == held(node) & reachable(parent)  else
    a node that nobody holds has an unknown parent and at least one child that is held (so nodes <= 2 * entries)

so along a chain the reachable sets only shrink, which is what `match` searches by.
"""

# ruff: noqa: S101 (check_integrity consists of assertions)
from array import array
from collections.abc import Iterator, Sequence

from kvbus_blocks.index import Held, IndexMemory, IndexSizes, Owner, StoreOutcome

_ROOT = -1
_UNKNOWN = -2
# Blocks between two probes of a search: a 50K-token prompt costs about 50 look-ups plus 6 per place where owners end.
_STRIDE = 64
# Equal masks share one int object up to this many distinct ones; beyond it sharing starts anew (memory, not correctness).
_MAX_INTERNED = 4096
_BYTES_PER_ENTRY = 250


class _Node:
    __slots__ = ("children", "held", "parent", "reachable")

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.held = 0
        self.reachable = 0
        # Nearly every node has one child at most: a set for each would double the memory.
        self.children: int | set[int] | None = None

    def each_child(self) -> Iterator[int]:
        if isinstance(self.children, int):
            yield self.children
        elif self.children is not None:
            yield from self.children

    def add_child(self, key: int) -> None:
        if self.children is None:
            self.children = key
        elif isinstance(self.children, int):
            if self.children != key:
                self.children = {self.children, key}
        else:
            self.children.add(key)

    def discard_child(self, key: int) -> None:
        if isinstance(self.children, set):
            self.children.discard(key)
            if len(self.children) == 1:
                self.children = next(iter(self.children))
        elif self.children == key:
            self.children = None


class PlainIndex:
    """`PrefixIndex` over dicts, about 250 bytes per entry that is not shared."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._slots: dict[Owner, int] = {}
        self._owners: list[Owner | None] = []
        self._held: list[set[int]] = []
        self._free_slots: list[int] = []
        self._interned: dict[int, int] = {}
        self._entries = 0
        self._orphans = 0
        self._placeholders = 0

    def store(self, owner: Owner, parent: int | None, keys: Sequence[int]) -> StoreOutcome:
        if not keys:
            return StoreOutcome()
        slot = self._slot(owner)
        bit, held, nodes = 1 << slot, self._held[slot], self._nodes
        above = _ROOT if parent is None else parent
        reachable = parent is None or self._is_reachable(parent, bit)
        added = orphans = stored = 0
        for key in keys:
            node = nodes.get(key)
            if node is None or node.parent != above:
                node = self._place(key, node, above)
                if node is None:
                    break
            stored += 1
            if not node.held & bit:
                if not node.held and node.children is not None:
                    self._placeholders -= 1
                node.held = self._intern(node.held | bit)
                held.add(key)
                added += 1
                self._orphans += 1
            if not reachable:
                orphans += 1
            elif not node.reachable & bit:
                self._reach(node, bit)
            above = key
        self._entries += added
        if not held:
            self._release(owner, slot)
        return StoreOutcome(added, orphans, len(keys) - stored)

    def remove(self, owner: Owner, keys: Sequence[int]) -> int:
        slot = self._slots.get(owner)
        if slot is None:
            return 0
        bit, held = 1 << slot, self._held[slot]
        removed = 0
        for key in keys:
            if key not in held:
                continue
            node = self._nodes[key]
            if node.reachable & bit:
                self._unreach(node, bit)
            held.discard(key)
            node.held = self._intern(node.held & ~bit)
            self._orphans -= 1
            removed += 1
            if not node.held:
                self._abandon(key, node)
        self._entries -= removed
        if not held:
            self._release(owner, slot)
        return removed

    def clear(self, owner: Owner) -> int:
        slot = self._slots.get(owner)
        if slot is None:
            return 0
        bit, held = 1 << slot, self._held[slot]
        for key in held:
            node = self._nodes[key]
            if not node.reachable & bit:
                self._orphans -= 1
            node.held = self._intern(node.held & ~bit)
            node.reachable = self._intern(node.reachable & ~bit)
            if not node.held:
                self._abandon(key, node)
        count = len(held)
        self._entries -= count
        held.clear()
        self._release(owner, slot)
        return count

    def drop(self, instance_id: str) -> int:
        return sum(self.clear(owner) for owner in [o for o in self._slots if o.instance_id == instance_id])

    def match(self, keys: Sequence[int]) -> dict[Owner, int]:
        depths: dict[Owner, int] = {}
        if not keys:
            return depths
        alive = self._reachable(keys[0])
        low, last = 0, len(keys) - 1
        while alive and low < last:
            high = min(low + _STRIDE, last)
            there = alive & self._reachable(keys[high])
            if there != alive:
                self._settle(keys, low, high, alive & ~there, depths)
            low, alive = high, there
        self._note(alive, len(keys), depths)
        return depths

    def owners(self) -> list[Owner]:
        return list(self._slots)

    def held(self, owner: Owner) -> Held:
        slot = self._slots.get(owner)
        if slot is None:
            return Held(array("Q"), array("Q"))
        keys, nodes = array("Q", self._held[slot]), self._nodes
        above = ((key, nodes[key].parent) for key in keys)
        return Held(keys, array("Q", [key if parent == _ROOT else parent for key, parent in above]))

    def sizes(self) -> IndexSizes:
        return IndexSizes(len(self._nodes) - self._placeholders, self._entries, len(self._slots), self._orphans)

    def memory(self) -> IndexMemory:
        return IndexMemory(len(self._interned), _BYTES_PER_ENTRY * self._entries)

    def check_integrity(self) -> None:
        entries = orphans = placeholders = 0
        for key, node in self._nodes.items():
            for child in node.each_child():
                assert self._nodes[child].parent == key, "a child has another parent"
                assert self._nodes[child].held, "a child is held by nobody"
            assert node.reachable & ~node.held == 0, "reachable but not held"
            if not node.held:
                placeholders += 1
                assert node.parent == _UNKNOWN, "an abandoned node knows its parent"
                assert node.children is not None, "an abandoned node without children"
            elif node.parent == _ROOT:
                assert node.reachable == node.held, "a first block is an orphan"
            else:
                parent = self._nodes[node.parent]
                assert key in set(parent.each_child()), "a parent does not know its child"
                assert node.reachable == node.held & parent.reachable, "reachable without its prefix, or the reverse"
            entries += node.held.bit_count()
            orphans += (node.held & ~node.reachable).bit_count()
        assert (entries, orphans, placeholders) == (self._entries, self._orphans, self._placeholders), "counts are off"
        for owner, slot in self._slots.items():
            assert self._owners[slot] == owner, "the slot belongs to another owner"
            assert self._held[slot], "an owner without entries"
            assert all(self._nodes[key].held >> slot & 1 for key in self._held[slot]), "held, but not in the node"
        assert entries == sum(len(held) for held in self._held), "entries of nobody"
        assert len(self._slots) + len(self._free_slots) == len(self._owners), "a slot was lost"

    def _place(self, key: int, node: _Node | None, above: int) -> _Node | None:
        """Put the node of ``key`` (made if need be) below ``above``; None when it lies elsewhere."""
        if key == above or (node is not None and node.parent != _UNKNOWN):
            return None
        if node is None:
            node = self._nodes[key] = _Node(above)
        node.parent = above
        if above != _ROOT:
            parent = self._nodes.get(above)
            if parent is None:
                parent = self._nodes[above] = _Node(_UNKNOWN)
                self._placeholders += 1
            parent.add_child(key)
        return node

    def _abandon(self, key: int, node: _Node) -> None:
        """Nobody holds the node any more: forget it, or where it lies if it has children."""
        above, node.parent = node.parent, _UNKNOWN
        if above != _ROOT:
            parent = self._nodes[above]
            parent.discard_child(key)
            if not parent.held and parent.children is None:
                del self._nodes[above]
                self._placeholders -= 1
        if node.children is None:
            del self._nodes[key]
        else:
            self._placeholders += 1

    def _reach(self, node: _Node, bit: int) -> None:
        """The owner holds the node's whole prefix: so it is reachable, and what it holds below as well."""
        stack = [node]
        while stack:
            node = stack.pop()
            node.reachable = node.held if node.reachable | bit == node.held else self._intern(node.reachable | bit)
            self._orphans -= 1
            if node.children is not None:
                below = (self._nodes[child] for child in node.each_child())
                stack.extend(child for child in below if child.held & ~child.reachable & bit)

    def _unreach(self, node: _Node, bit: int) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            node.reachable = self._intern(node.reachable & ~bit)
            self._orphans += 1
            if node.children is not None:
                below = (self._nodes[child] for child in node.each_child())
                stack.extend(child for child in below if child.reachable & bit)

    def _settle(self, keys: Sequence[int], low: int, high: int, ending: int, depths: dict[Owner, int]) -> None:
        """All of ``ending`` reach keys[low] and none reaches keys[high]: find where each ends."""
        if not ending:
            return
        if high - low == 1:
            self._note(ending, high, depths)
            return
        middle = (low + high) // 2
        there = ending & self._reachable(keys[middle])
        self._settle(keys, middle, high, there, depths)
        self._settle(keys, low, middle, ending & ~there, depths)

    def _note(self, mask: int, depth: int, depths: dict[Owner, int]) -> None:
        while mask:
            lowest = mask & -mask
            owner = self._owners[lowest.bit_length() - 1]
            if owner is not None:
                depths[owner] = depth
            mask ^= lowest

    def _reachable(self, key: int) -> int:
        node = self._nodes.get(key)
        return 0 if node is None else node.reachable

    def _is_reachable(self, key: int, bit: int) -> bool:
        return bool(self._reachable(key) & bit)

    def _slot(self, owner: Owner) -> int:
        slot = self._slots.get(owner)
        if slot is None:
            if self._free_slots:
                slot = self._free_slots.pop()
                self._owners[slot] = owner
            else:
                slot = len(self._owners)
                self._owners.append(owner)
                self._held.append(set())
            self._slots[owner] = slot
        return slot

    def _release(self, owner: Owner, slot: int) -> None:
        del self._slots[owner]
        self._owners[slot] = None
        self._held[slot] = set()
        self._free_slots.append(slot)

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= _MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)
