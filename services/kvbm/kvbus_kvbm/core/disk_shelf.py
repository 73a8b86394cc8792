"""The blocks of one model and layout on the disk: which slot holds which, which can be read, what goes when room is needed.

Life of a slot:

    free -> writing -> kept -> [read] -> evicted, dropped or found damaged -> free

A block whose parent is missing (its record was damaged, or its data) stays: it can be read by who has its prefix from elsewhere,
and is told of again as soon as the parent is back. Others are told of *present* blocks only: kept, with their whole prefix.

What the journal has to hear besides new blocks is collected in ``pending``, the latest per key. A slot must not be written
before the word that its former block is gone has reached the journal: whoever writes takes ``pending`` along first.
"""

# ruff: noqa: S101 (check_integrity asserts)

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import MAX_PRIORITY, PLAIN, Directive, EvictionOrder, PinCaps, apply, shifted
from kvbus_kvbm.core.disk_blocks import DiskBlock, DiskChanges
from kvbus_kvbm.core.disk_records import Gone, Kept, Record
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import PoolSpec
from kvbus_wire.kv_events import KvEvent

# The same share as that of all tenants in `PinCaps`, which counts against the whole disk.
_PINNED_SHARE = 0.9


class Segment:
    """One file of equal slots. Free ones are given in order of their place: what is written together lies together."""

    def __init__(self, number: int, slots: int, size_bytes: int) -> None:
        self.number = number
        self.slots = slots
        self.size_bytes = size_bytes
        self.free = list(range(slots))
        self.closing = False

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.slots


class Shelf:
    """See the module. ``evictions`` are counted by class. ``unix_s``: what to add to the caller's clock to get unix time."""

    def __init__(
        self, spec: PoolSpec, slot_bytes: int, caps: PinCaps, evictions: dict[str, int], unix_s: float
    ) -> None:
        self.spec = spec
        self.slot_bytes = slot_bytes
        self.segments: dict[int, Segment] = {}
        self.next_segment = 1
        self.in_use = False
        self._unix_s = unix_s
        self._caps = caps
        self._evictions = evictions
        self._blocks: dict[bytes, DiskBlock] = {}
        self._waiting: dict[bytes, set[DiskBlock]] = {}
        self._pending: dict[bytes, Record] = {}
        self._changes = DiskChanges()
        self._order: EvictionOrder[DiskBlock] = EvictionOrder(lambda: len(self._blocks))
        self._open: dict[int, Segment] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[DiskBlock]:
        return iter(self._blocks.values())

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments.values())

    @property
    def pending(self) -> int:
        return len(self._pending)

    def by_use(self) -> list[DiskBlock]:
        """All that are kept, the least recently used first: so they come back in that order."""
        return sorted((block for block in self._blocks.values() if block.kept), key=lambda block: block.used)

    def find(self, key: bytes) -> DiskBlock | None:
        return self._blocks.get(key)

    def run(self, keys: Sequence[bytes]) -> list[DiskBlock]:
        """The leading blocks of a piece of a chain that can be read."""
        run: list[DiskBlock] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.kept or (run and block.parent_key != run[-1].key):
                break
            run.append(block)
        return run

    def is_placeable(self, parent: bytes) -> bool:
        """Nothing is kept below a block that is not here."""
        return parent == ROOT or parent in self._blocks

    @property
    def free_slots(self) -> int:
        return sum(len(segment.free) for segment in self._open.values())

    def add_segment(self, slots: int) -> Segment:
        segment = Segment(self.next_segment, slots, slots * self.slot_bytes)
        self.next_segment += 1
        self.segments[segment.number] = self._open[segment.number] = segment
        return segment

    def remove_segment(self, segment: Segment) -> None:
        """Take it away with all that lies in it; nobody may read or write there."""
        segment.closing = True
        self._open.pop(segment.number, None)
        blocks = [b for b in self._blocks.values() if b.segment == segment.number]
        for block in sorted(blocks, key=lambda b: b.depth, reverse=True):
            self._evict(block)
        del self.segments[segment.number]

    def evict(self, now_s: float) -> bool:
        """Make room of one slot. False: nothing may go.

        What is pinned stays, unless pins (with what they hang on) hold nearly all: then the least of them goes, or nobody else
        would get anything until they expire.
        """
        block = self._order.pop(now_s, spare_pinned=True)
        if block is None and len(self) > _PINNED_SHARE * sum(segment.slots for segment in self.segments.values()):
            block = self._order.pop(now_s)
        if block is None:
            return False
        self._evict(block)
        return True

    def place(self, meta: BlockMeta, now_s: float) -> DiskBlock:
        """A free slot for a new block, which is *writing* until `keep` or `give_up`."""
        segment = next(iter(self._open.values()))
        block = DiskBlock(meta, segment.number, heapq.heappop(segment.free))
        if not segment.free:
            del self._open[segment.number]
        block.writing = True
        block.directive, _ = apply(self._caps, block.key, None, _sane(meta.directive), now_s)
        self._order.use(block)
        self._insert(block)
        return block

    def keep(self, block: DiskBlock, recorded: Kept) -> None:
        """It was written, and so was its record."""
        block.writing = False
        if block.detached:
            self._free_if_unused(block)
            return
        block.kept = True
        record = self.record_of(block)
        if record != recorded:  # another directive meanwhile
            self._pending[block.key] = record
        self._make_present(block)
        self._order.offer(block)

    def give_up(self, block: DiskBlock, *, perhaps_recorded: bool) -> None:
        """It was not written. ``perhaps_recorded``: but its record may have been."""
        block.writing = False
        if perhaps_recorded:
            self._pending[block.key] = Gone(block.key)
        if not block.detached:
            self._take_out(block)
        self._free_if_unused(block)

    def remove(self, block: DiskBlock) -> None:
        """Forget a block. What is below it waits for its return, untold."""
        if block.detached:
            return
        self._pending[block.key] = Gone(block.key)
        self._take_out(block)
        self._free_if_unused(block)

    def begin_use(self) -> None:
        """What is placed and used from here on is equally recent."""
        self._order.begin_use()

    def use(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            self._order.use(block)

    def direct(self, block: DiskBlock, said: Directive, now_s: float) -> bool:
        """Another use says so. False: it was to be pinned, and is not, or not for so long."""
        directive, is_refused = apply(self._caps, block.key, block.directive, _sane(said), now_s)
        if block.directive != directive:
            block.directive = directive
            if block.kept:
                self._pending[block.key] = self.record_of(block)
                self._order.offer(block)
        return not is_refused

    def hold(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            block.readers += 1

    def let_go(self, blocks: Iterable[DiskBlock]) -> None:
        for block in blocks:
            block.readers -= 1
            self._free_if_unused(block)
            self._order.offer(block)

    def record_of(self, block: DiskBlock) -> Kept:
        directive = shifted(block.directive, self._unix_s)
        return Kept(block.key, block.parent_key, block.depth, block.checksum, block.segment, block.slot, directive)

    def take_pending(self) -> list[Record]:
        pending, self._pending = self._pending, {}
        return list(pending.values())

    def put_back(self, records: Iterable[Record]) -> None:
        """The journal did not take them; newer ones about the same keys count."""
        for record in records:
            self._pending.setdefault(record.key, record)

    def take_events(self) -> Sequence[KvEvent]:
        return self._changes.take()

    def recover(self, records: Iterable[Record], segments: dict[int, int], now_s: float) -> int:
        """Take over what a journal says, into segments of so many slots each (by number). Return how many blocks it named that
        cannot be here."""
        newest: dict[bytes, Kept] = {}
        owners: dict[tuple[int, int], bytes] = {}
        for record in records:
            if isinstance(record, Gone):
                newest.pop(record.key, None)
                continue
            newest.pop(record.key, None)  # so that the order is that of the last records
            newest[record.key] = record
            owners[record.segment, record.slot] = record.key
            self.next_segment = max(self.next_segment, record.segment + 1)
        for number, slots in segments.items():
            self.segments[number] = Segment(number, slots, slots * self.slot_bytes)
            self.next_segment = max(self.next_segment, number + 1)
        lost = 0
        for record in newest.values():
            is_here = owners[record.segment, record.slot] == record.key
            if not is_here or record.slot >= segments.get(record.segment, 0):
                lost += 1
                self._pending[record.key] = Gone(record.key)
                continue
            self._recover_one(record, now_s)
        taken = {(block.segment, block.slot) for block in self._blocks.values()}
        for segment in self.segments.values():
            segment.free = [slot for slot in range(segment.slots) if (segment.number, slot) not in taken]
            if segment.free:
                self._open[segment.number] = segment
        firsts = [block for block in self._blocks.values() if block.parent_key == ROOT]
        for block in firsts:
            self._make_present(block)
        for block in self._blocks.values():
            self._order.offer(block)
        return lost

    def _evict(self, block: DiskBlock) -> None:
        kind = self._order.kind(block)
        self._evictions[kind] = self._evictions.get(kind, 0) + 1
        self.remove(block)

    def _recover_one(self, record: Kept, now_s: float) -> None:
        directive = self._caps.grant(record.key, _sane(shifted(record.directive, -self._unix_s)), now_s)
        meta = BlockMeta(record.key, record.parent, record.depth, record.checksum, directive)
        block = DiskBlock(meta, record.segment, record.slot)
        # Not kept yet while it is used: it must not be offered before its children are known.
        self._order.begin_use()
        self._order.use(block)
        block.kept = True
        self._insert(block)

    def _insert(self, block: DiskBlock) -> None:
        self._blocks[block.key] = block
        if block.parent_key != ROOT:
            parent = self._blocks.get(block.parent_key)
            if parent is None:
                self._waiting.setdefault(block.parent_key, set()).add(block)
            else:
                block.parent = parent
                parent.children.add(block)
        for child in self._waiting.pop(block.key, ()):
            child.parent = block
            block.children.add(child)

    def _take_out(self, block: DiskBlock) -> None:
        """Out of the index; its children wait for its return."""
        # What is below one that is not present is not either: nothing is walked twice.
        told = [b for b in block.subtree() if b.present] if block.present else []
        for gone in told:
            gone.present = False
        self._changes.removed(reversed(told))
        block.detached = True
        self._caps.forget(block.key)
        del self._blocks[block.key]
        if block.children:
            self._waiting.setdefault(block.key, set()).update(block.children)
            for child in block.children:
                child.parent = None
            block.children = set()
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children.discard(block)
            self._order.offer(parent)
        elif block.parent_key != ROOT:
            waiting = self._waiting.get(block.parent_key, set())
            waiting.discard(block)
            if not waiting:
                self._waiting.pop(block.parent_key, None)

    def _make_present(self, block: DiskBlock) -> None:
        if block.parent_key != ROOT and (block.parent is None or not block.parent.present):
            return
        told: list[DiskBlock] = []
        stack = [block]
        while stack:
            block = stack.pop()
            block.present = True
            told.append(block)
            stack += sorted((child for child in block.children if child.kept), key=lambda b: b.key)
        self._changes.stored(told)

    def _free_if_unused(self, block: DiskBlock) -> None:
        if not block.detached or block.readers or block.writing or block.freed:
            return
        segment = self.segments.get(block.segment)
        if segment is not None:
            heapq.heappush(segment.free, block.slot)
            if not segment.closing:
                self._open[segment.number] = segment
        block.freed = True

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests: it looks at everything."""
        places = Counter((b.segment, b.slot) for b in self._blocks.values())
        assert all(count == 1 for count in places.values()), "two blocks in a slot"
        for segment in self.segments.values():
            assert len(set(segment.free)) == len(segment.free)
            assert all((segment.number, slot) not in places for slot in segment.free), "a taken slot is free"
            assert (segment.number in self._open) == bool(segment.free)
        for key, block in self._blocks.items():
            assert (key, False) == (block.key, block.detached)
            assert block.parent is self._blocks.get(block.parent_key)
            assert block.parent is None or block in block.parent.children
            assert block.kept != block.writing
            is_below = block.parent_key == ROOT or (block.parent is not None and block.parent.present)
            assert block.present == (block.kept and is_below)
        waiting = {b for blocks in self._waiting.values() for b in blocks}
        assert waiting == {b for b in self._blocks.values() if b.parent is None and b.parent_key != ROOT}
        assert self._order.offered() == {b for b in self._blocks.values() if b.is_evictable}


def _sane(said: Directive) -> Directive:
    """Whatever came here, from a bus or a disk: no number may break the order of the blocks."""
    if said.expires_s is not None and math.isnan(said.expires_s):
        return PLAIN
    if abs(said.priority) <= MAX_PRIORITY:
        return said
    return msgspec.structs.replace(said, priority=max(-MAX_PRIORITY, min(MAX_PRIORITY, said.priority)))
