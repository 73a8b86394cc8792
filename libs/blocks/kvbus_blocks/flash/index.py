"""The prefix index over flat memory, changed and searched by compiled kernels. ADR 11 has the reasons.

One thread changes an index at a time (others wait); any number match meanwhile, and wait for nothing. A match reads memory that
its *view* names and keeps alive. What could change under it is announced in the header before it happens: the *epoch* grows before
anything is reused or moved, the *generation* when memory or the table of owners is replaced. A match that ran across either is
repeated, and after some tries it takes the lock.

Raise IndexFull when a store might need more than ``max_blocks``.
"""

import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbus_blocks.flash import layout as at
from kvbus_blocks.flash.compiled import Kernels
from kvbus_blocks.flash.depths import Depths
from kvbus_blocks.flash.integrity import check_integrity
from kvbus_blocks.flash.memory import Memory
from kvbus_blocks.index import Held, IndexMemory, IndexSizes, Owner, StoreOutcome
from kvbus_blocks.keys import ShortKeys

DEFAULT_MAX_BLOCKS = 1 << 26
MATCH_TRIES = 8
_OWNERS_PER_WORD = 64
# Of a match: how deep a search may be halved (far more than any chain needs), two words each.
_STACK_WORDS = 2 * 64
_MIN_SETS = 64


class IndexFull(Exception):
    """``max_blocks`` is what the index was made for."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__(f"the index was made for {max_blocks} blocks")
        self.max_blocks = max_blocks


class _Sets(NamedTuple):
    """Memory of the owner sets: bits, hashes and references, and the table to find them by."""

    bits: Memory
    meta: Memory
    interned: Memory
    width: int
    capacity: int

    @staticmethod
    def reserve(width: int, capacity: int) -> "_Sets":
        """``width``: words of bits."""
        return _Sets(
            Memory(8 * width * capacity),
            Memory(8 * at.SET_META_WORDS * capacity),
            Memory(4 * 2 * capacity),
            width,
            capacity,
        )


class _Scratch:
    """What one match writes to."""

    def __init__(self, width: int) -> None:
        self.done = array("q", bytes(8 * (width + _STACK_WORDS)))
        self.found = array("i", bytes(4 * 2 * _OWNERS_PER_WORD * width))
        self.done_at, self.found_at = self.done.buffer_info()[0], self.found.buffer_info()[0]


class _View(NamedTuple):
    """What a match needs, unchanging. ``memory`` is only kept alive; ``scratch`` holds what no match uses at the moment."""

    words: "array[int]"
    address: int
    owners: tuple[Owner | None, ...]
    width: int
    memory: tuple[Memory | None, ...]
    scratch: list[_Scratch]


class FlashIndex:
    """`PrefixIndex` in about 54 bytes per block, whoever and however many hold it. Thread-safe.

    ``max_blocks`` bounds distinct blocks; address space for so many is reserved, memory is used for those that are there. Raise
    ValueError beyond `layout.MAX_BLOCKS`.
    """

    def __init__(self, kernels: Kernels, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if not 0 < max_blocks <= at.MAX_BLOCKS:
            raise ValueError(f"an index takes 1 to {at.MAX_BLOCKS} blocks, not {max_blocks}")
        self._kernels = kernels
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._slots: dict[Owner, int] = {}
        self._owners: list[Owner | None] = []
        self._free_slots: list[int] = []
        self._header = array("q", bytes(8 * at.HEADER_WORDS))
        self._header_at = self._header.buffer_info()[0]
        self._result = array("q", bytes(8 * at.RESULT_WORDS))
        self._result_at = self._result.buffer_info()[0]
        self._owner_words = array("q")
        nodes = max_blocks + at.FIRST_NODE
        self._nodes = Memory(8 * at.NODE_WORDS * nodes)
        self._links = Memory(4 * at.LINK_WORDS * nodes)
        self._table = Memory(at.SLOT_BYTES * at.MIN_TABLE_SLOTS)
        self._old_table: Memory | None = None
        self._sets = _Sets.reserve(1, _MIN_SETS)
        header = self._header
        header[at.NODES], header[at.LINKS] = self._nodes.address, self._links.address
        header[at.NODE_TOP] = header[at.NODE_PEAK] = header[at.SWEEP] = at.FIRST_NODE
        header[at.TABLE], header[at.TABLE_MASK] = self._table.address, at.MIN_TABLE_SLOTS - 1
        header[at.SETS], header[at.SET_META], header[at.INTERNED] = (memory.address for memory in self._sets[:3])
        header[at.SET_WIDTH], header[at.SET_CAPACITY] = self._sets.width, self._sets.capacity
        header[at.INTERNED_MASK] = 2 * self._sets.capacity - 1
        header[at.SET_TOP] = 1
        self._publish()

    # -- changes

    def store(self, owner: Owner, parent: int | None, keys: Sequence[int]) -> StoreOutcome:
        count = len(keys)
        if not count:
            return StoreOutcome()
        words, step, _alive = _words_of(keys)
        added = orphans = stored = 0
        with self._lock:
            self._attend()
            if self._header[at.NODE_LIVE] + count + 1 > self._max_blocks:
                raise IndexFull(self._max_blocks)
            slot = self._slot(owner)
            below_root, above = parent is None, parent or 0
            result = self._result
            for first in range(0, count, at.CHUNK_KEYS):
                part = min(at.CHUNK_KEYS, count - first)
                self._kernels.store(
                    self._header_at,
                    slot,
                    below_root,
                    above,
                    words,
                    first * step,
                    step,
                    part,
                    self._result_at,
                )
                added += result[at.ADDED]
                orphans += result[at.OUT_OF_REACH]
                stored += result[at.STORED]
                self._attend()
                if result[at.STORED] < part:
                    break
                below_root, above = False, keys[first + part - 1]
            self._release_if_empty(owner, slot)
        return StoreOutcome(added, orphans, count - stored)

    def remove(self, owner: Owner, keys: Sequence[int]) -> int:
        words, step, _alive = _words_of(keys)
        removed = 0
        with self._lock:
            slot = self._slots.get(owner)
            if slot is None:
                return 0
            self._attend()
            for first in range(0, len(keys), at.CHUNK_KEYS):
                part = min(at.CHUNK_KEYS, len(keys) - first)
                self._kernels.remove(self._header_at, slot, words, first * step, step, part, self._result_at)
                removed += self._result[at.ADDED]
                self._attend()
            self._release_if_empty(owner, slot)
        return removed

    def clear(self, owner: Owner) -> int:
        with self._lock:
            slot = self._slots.get(owner)
            if slot is None:
                return 0
            self._attend()
            self._kernels.clear(self._header_at, slot, self._result_at)
            removed = self._result[at.ADDED]
            self._attend()
            self._release_if_empty(owner, slot)
        return removed

    def drop(self, instance_id: str) -> int:
        with self._lock:
            owners = [owner for owner in self._slots if owner.instance_id == instance_id]
        return sum(map(self.clear, owners))

    # -- reading

    def match(self, keys: Sequence[int]) -> Depths:
        count = len(keys)
        if not count:
            return Depths((), array("i"))
        words, step, _alive = _words_of(keys)
        for _ in range(MATCH_TRIES):
            found = self._try_match(words, step, count)
            if found is not None:
                return found
        with self._lock:
            found = self._try_match(words, step, count)
        assert found is not None, "a match met a change, though nobody changes anything"  # noqa: S101
        return found

    def owners(self) -> list[Owner]:
        with self._lock:
            return list(self._slots)

    def held(self, owner: Owner) -> Held:
        with self._lock:
            slot = self._slots.get(owner)
            count = 0 if slot is None else self._owner_words[at.OWNER_WORDS * slot + at.HELD]
            keys, parents = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
            if count:
                self._kernels.copy_held(self._header_at, slot, keys.buffer_info()[0], parents.buffer_info()[0])
        return Held(keys, parents)

    def sizes(self) -> IndexSizes:
        header = self._header
        blocks = header[at.NODE_LIVE] - header[at.PLACEHOLDERS]
        return IndexSizes(blocks, header[at.ENTRIES], len(self._slots), header[at.ORPHANS])

    def memory(self) -> IndexMemory:
        header = self._header
        old_table = self._old_table  # another thread may drop it meanwhile
        tables = self._table.size_bytes + (0 if old_table is None else old_table.size_bytes)
        nodes = header[at.NODE_PEAK] * at.NODE_BYTES
        sets = header[at.SET_TOP] * 8 * (self._sets.width + at.SET_META_WORDS) + self._sets.interned.size_bytes
        return IndexMemory(header[at.SET_LIVE], tables + nodes + sets)

    def check_integrity(self) -> None:
        with self._lock:
            check_integrity(self._header, self._view.memory, self._owner_words, self._slots, self._owners)

    # -- owners

    def _slot(self, owner: Owner) -> int:
        slot = self._slots.get(owner)
        if slot is not None:
            return slot
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owners[slot] = owner
        else:
            slot = len(self._owners)
            if slot >= _OWNERS_PER_WORD * self._sets.width:
                self._resize_sets(2 * self._sets.width, self._sets.capacity)
            self._owners.append(owner)
            self._owner_words.extend([0] * at.OWNER_WORDS)
            self._header[at.OWNERS] = self._owner_words.buffer_info()[0]
        self._slots[owner] = slot
        self._publish()
        return slot

    def _release_if_empty(self, owner: Owner, slot: int) -> None:
        """Its slot is somebody else's only after another view is published."""
        if not self._owner_words[at.OWNER_WORDS * slot + at.HELD]:
            del self._slots[owner]
            self._owners[slot] = None
            self._free_slots.append(slot)

    # -- memory

    def _attend(self) -> None:
        """See to what the last call has asked for, so that the next one has room for all it may do.

        Kernels check no bounds. So what cannot be done for want of memory stays asked for, and no kernel runs before it is done.
        """
        wants = self._result[at.WANTS]
        if not wants:
            return
        if wants & at.WANTS_OLD_TABLE_DROPPED:
            self._drop_old_table()
        if wants & at.WANTS_TABLE:
            self._replace_table()
        if wants & at.WANTS_SETS:
            self._resize_sets(self._sets.width, 2 * self._sets.capacity)
        self._result[at.WANTS] = 0
        if wants & at.WANTS_TRIM:
            top = self._header[at.NODE_TOP]
            self._nodes.give_back(8 * at.NODE_WORDS * top)
            self._links.give_back(4 * at.LINK_WORDS * top)
            self._header[at.NODE_PEAK] = top

    def _replace_table(self) -> None:
        """Begin with a new table, of a size that fits what is there; the kernels take over the old one bit by bit."""
        header = self._header
        if self._old_table is not None:
            self._kernels.settle(self._header_at)
            self._drop_old_table()
        slots = at.MIN_TABLE_SLOTS
        while slots < 2 * (header[at.NODE_LIVE] + at.CHUNK_KEYS + 1):
            slots *= 2
        table = Memory(at.SLOT_BYTES * slots)
        header[at.OLD], header[at.OLD_MASK] = header[at.TABLE], header[at.TABLE_MASK]
        header[at.OLD_CURSOR] = 0
        self._old_table, self._table = self._table, table
        header[at.TABLE], header[at.TABLE_MASK] = self._table.address, slots - 1
        header[at.TABLE_LIVE] = header[at.TABLE_USED] = 0
        self._publish()

    def _drop_old_table(self) -> None:
        self._header[at.OLD] = self._header[at.OLD_MASK] = 0
        self._old_table = None
        self._publish()
        self._table.settle(self._table.size_bytes)
        self._nodes.settle(8 * at.NODE_WORDS * self._header[at.NODE_TOP])
        self._links.settle(4 * at.LINK_WORDS * self._header[at.NODE_TOP])

    def _resize_sets(self, width: int, capacity: int) -> None:
        sets = _Sets.reserve(width, capacity)
        addresses = (memory.address for memory in sets[:3])
        bits, meta, interned = addresses
        self._kernels.resize(self._header_at, bits, width, meta, capacity, interned, 2 * capacity)
        self._sets = sets
        self._publish()

    def _publish(self) -> None:
        header = self._header
        header[at.GENERATION] += 1
        words = array("q", bytes(8 * at.VIEW_WORDS))
        words[at.VIEW_GENERATION] = header[at.GENERATION]
        for here, there in _VIEW_OF_HEADER:
            words[here] = header[there]
        memory = (self._nodes, self._links, self._table, self._old_table, *self._sets[:3])
        self._view = _View(words, words.buffer_info()[0], tuple(self._owners), self._sets.width, memory, [])

    def _try_match(self, words: "bytes | int", step: int, count: int) -> Depths | None:
        view = self._view
        try:
            scratch = view.scratch.pop()
        except IndexError:
            scratch = _Scratch(view.width)
        total = self._kernels.match(
            self._header_at, view.address, words, step, count, scratch.done_at, scratch.found_at
        )
        found = None if total == at.RETRY else Depths(view.owners, scratch.found[: 2 * total])
        view.scratch.append(scratch)
        return found


_VIEW_OF_HEADER = (
    (at.VIEW_NODES, at.NODES),
    (at.VIEW_TABLE, at.TABLE),
    (at.VIEW_TABLE_MASK, at.TABLE_MASK),
    (at.VIEW_OLD, at.OLD),
    (at.VIEW_OLD_MASK, at.OLD_MASK),
    (at.VIEW_SETS, at.SETS),
    (at.VIEW_SET_WIDTH, at.SET_WIDTH),
    (at.VIEW_SET_CAPACITY, at.SET_CAPACITY),
)


def _words_of(keys: Sequence[int]) -> "tuple[bytes | int, int, object]":
    """Keys as a kernel takes them: their data or its address, the words from one to the next, and what keeps them alive.

    Without a copy for `ShortKeys` and arrays of 64-bit words; an array cannot be resized as long as it is kept. Raise OverflowError
    for what is no such word.
    """
    if isinstance(keys, ShortKeys):
        return keys.packed, 2, keys
    if not isinstance(keys, array) or keys.typecode not in _WORD_TYPES:
        keys = array("Q", _buffer_of_words(keys) or keys)
    return keys.buffer_info()[0], 1, memoryview(keys)


_WORD_TYPES = [code for code in "QqLl" if array(code).itemsize == 8]


def _buffer_of_words(keys: Any) -> bytes | None:
    """The data, if it is an array of some other library."""
    try:
        view = memoryview(keys)
    except TypeError:
        return None
    return view.tobytes() if view.itemsize == 8 and view.format in _WORD_TYPES else None
