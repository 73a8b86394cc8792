"""Looks at everything an index knows, with Python's eyes, and compares. About 10 us per block."""

# ruff: noqa: S101 (it consists of assertions)
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvbus_blocks.flash import layout as at
from kvbus_blocks.flash.memory import Memory
from kvbus_blocks.index import Owner

_LOW_HALF = 0xFFFFFFFF


class _Nodes:
    """The nodes of an index, as Python objects would show them."""

    def __init__(self, header: "array[int]", memory: Sequence[Memory | None]) -> None:
        nodes, links, self.table, self.old_table, bits, meta, interned = memory
        assert nodes is not None and links is not None and self.table is not None  # noqa: PT018 (for the type checker)
        assert bits is not None and meta is not None and interned is not None  # noqa: PT018
        self.header = header
        self.words, self.links = nodes.words64(), links.words32()
        self.bits, self.meta, self.interned = bits.words64(), meta.words64(), interned.words32()
        self.live = [n for n in range(at.FIRST_NODE, header[at.NODE_TOP]) if self.link(n, at.PARENT) != at.FREE]

    def key(self, node: int) -> int:
        return self.words[at.NODE_WORDS * node]

    def held(self, node: int) -> int:
        return self.words[at.NODE_WORDS * node + 1] & _LOW_HALF

    def reachable(self, node: int) -> int:
        return self.words[at.NODE_WORDS * node + 1] >> 32

    def link(self, node: int, which: int) -> int:
        return self.links[at.LINK_WORDS * node + which]

    def children(self, node: int) -> Iterator[int]:
        before, child = at.NONE, self.link(node, at.CHILD)
        while child != at.NONE:
            assert self.link(child, at.PREV) == before, "siblings disagree"
            assert self.link(child, at.PARENT) == node, "a child has another parent"
            yield child
            before, child = child, self.link(child, at.NEXT)

    def peers(self, which: int) -> Iterator[int]:
        before, node = at.NONE, self.meta[at.SET_META_WORDS * which + at.SET_FIRST]
        while node != at.NONE:
            assert self.link(node, at.PREV_PEER) == before, "peers disagree"
            yield node
            before, node = node, self.link(node, at.NEXT_PEER)

    def mask(self, which: int) -> int:
        """The set as one integer, bit by bit."""
        width = self.header[at.SET_WIDTH]
        words = self.bits[which * width : (which + 1) * width]
        return sum((word & (1 << 64) - 1) << 64 * i for i, word in enumerate(words))

    def free(self) -> Iterator[int]:
        before, node = at.NONE, self.header[at.NODE_FREE]
        while node != at.NONE:
            assert self.link(node, at.PARENT) == at.FREE, "a node in use is in the list of free ones"
            assert self.link(node, at.PREV) == before, "free nodes disagree"
            assert self.words[at.NODE_WORDS * node + 1] == 0, "a free node has owners"
            yield node
            before, node = node, self.link(node, at.NEXT)


def check_integrity(
    header: "array[int]",
    memory: Sequence[Memory | None],
    owner_words: "array[int]",
    slots: Mapping[Owner, int],
    owners: Sequence[Owner | None],
) -> None:
    """Raise AssertionError when an invariant is broken."""
    nodes = _Nodes(header, memory)
    _check_tree(nodes)
    _check_counts(nodes, owner_words, slots, owners)
    _check_table(nodes)
    _check_sets(nodes)


def _check_tree(nodes: _Nodes) -> None:
    listed = {child for node in [at.ROOT, *nodes.live] for child in nodes.children(node)}
    placeholders = 0
    for node in nodes.live:
        held, reachable = nodes.mask(nodes.held(node)), nodes.mask(nodes.reachable(node))
        parent = nodes.link(node, at.PARENT)
        assert reachable & ~held == 0, "reachable but not held"
        if not held:
            placeholders += 1
            assert parent == at.NONE, "an abandoned node knows its parent"
            assert node not in listed, "an abandoned node is still a child"
            peers = nodes.link(node, at.PREV_PEER), nodes.link(node, at.NEXT_PEER)
            assert peers == (at.NONE, at.NONE), "an abandoned node names peers"
            assert [nodes.held(child) for child in nodes.children(node)] > [at.NO_OWNERS], (
                "an abandoned node without children"
            )
            continue
        assert all(nodes.held(child) for child in nodes.children(node)), "a child is held by nobody"
        assert node in listed, "a parent does not know its child"
        above = -1 if parent == at.ROOT else nodes.mask(nodes.reachable(parent))
        assert reachable == held & above, "reachable without its prefix, or the reverse"
    free = list(nodes.free())
    top = nodes.header[at.NODE_TOP]
    assert placeholders == nodes.header[at.PLACEHOLDERS], "placeholders are off"
    assert len(nodes.live) == nodes.header[at.NODE_LIVE], "live nodes are off"
    assert sorted([*free, *nodes.live]) == list(range(at.FIRST_NODE, top)), "a node was lost"
    assert len({nodes.key(node) for node in nodes.live}) == len(nodes.live), "a key is there twice"


def _check_counts(
    nodes: _Nodes, owner_words: "array[int]", slots: Mapping[Owner, int], owners: Sequence[Owner | None]
) -> None:
    held: Counter[int] = Counter()
    orphaned: Counter[int] = Counter()
    for node in nodes.live:
        mask = nodes.mask(nodes.held(node))
        lost = mask & ~nodes.mask(nodes.reachable(node))
        held.update(slot for slot in range(mask.bit_length()) if mask >> slot & 1)
        orphaned.update(slot for slot in range(lost.bit_length()) if lost >> slot & 1)
    assert set(held) == set(slots.values()), "an owner without entries, or entries of nobody"
    for slot, owner in enumerate(owners):
        counts = owner_words[at.OWNER_WORDS * slot + at.HELD], owner_words[at.OWNER_WORDS * slot + at.ORPHANED]
        assert counts == (held[slot], orphaned[slot]), "what an owner holds is off"
        assert owner is None or slots[owner] == slot, "the slot belongs to another owner"
    assert (held.total(), orphaned.total()) == (nodes.header[at.ENTRIES], nodes.header[at.ORPHANS]), "counts are off"


def _check_table(nodes: _Nodes) -> None:
    header = nodes.header
    assert nodes.table is not None
    slots = nodes.table.words64()[: header[at.TABLE_MASK] + 1].tolist()
    taken = _nodes_in(slots)
    assert header[at.TABLE_LIVE] == len(taken), "live slots are off"
    assert header[at.TABLE_USED] == len(slots) - slots.count(at.EMPTY), "used slots are off"
    if nodes.old_table is not None:
        old = nodes.old_table.words64()[: header[at.OLD_MASK] + 1].tolist()
        cursor = header[at.OLD_CURSOR]
        assert set(_nodes_in(old[:cursor])) <= set(taken), "what was moved is not there"
        taken += _nodes_in(old[cursor:])
    assert sorted(taken) == nodes.live, "the table does not hold each node once"


def _nodes_in(slots: list[int]) -> list[int]:
    return [slot & _LOW_HALF for slot in set(slots) - {at.EMPTY, at.TOMB}]


def _check_sets(nodes: _Nodes) -> None:
    header = nodes.header
    counts: Counter[int] = Counter()
    for node in nodes.live:
        counts.update((nodes.held(node), nodes.reachable(node)))
    del counts[at.NO_OWNERS]
    stored = [which for which in nodes.interned[: header[at.INTERNED_MASK] + 1] if which != at.NO_OWNERS]
    assert sorted(stored) == sorted(counts), "a set that nobody has, or one that is not known"
    assert len({nodes.mask(which) for which in stored}) == len(stored), "a set is there twice"
    assert all(nodes.meta[at.SET_META_WORDS * which + at.SET_REFS] == count for which, count in counts.items())
    for which in stored:
        peers = [node for node in nodes.live if nodes.held(node) == which]
        assert sorted(nodes.peers(which)) == peers, "a set does not know its nodes"
    assert header[at.SET_LIVE] == len(stored), "live sets are off"
    assert 2 * header[at.SET_LIVE] + 3 <= header[at.SET_CAPACITY], "no room for the sets of the next call"
