"""The blocks in the store of the cluster that this kvbm answers for: what it has told others of, what it counts, what goes next.

A block is *told of* when it lies in the store with its whole prefix. One whose prefix this kvbm does not know (another one wrote
it) waits untold, and can be read all the same.
"""

# ruff: noqa: S101 (check_integrity asserts)

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive, EvictionOrder, PinCaps, apply, shifted
from kvbus_kvbm.core.cluster_log import Kept
from kvbus_kvbm.core.cluster_objects import object_bytes
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.packing import pack_keys

_KEYS_PER_EVENT = 8192
"""An event has to fit into a message."""


class ClusterBlock:
    """``created``: by us, so it is ours to delete when it goes; others' are only forgotten. ``writing``: on its way."""

    __slots__ = (
        "checksum",
        "children",
        "created",
        "depth",
        "directive",
        "gone",
        "inflation",
        "key",
        "parent",
        "parent_key",
        "shelf",
        "told",
        "used",
        "uses",
        "writing",
    )

    def __init__(self, shelf: "ClusterShelf", meta: BlockMeta, directive: Directive, *, created: bool) -> None:
        self.shelf = shelf
        self.key = meta.key
        self.parent_key = meta.parent
        self.depth = meta.depth
        self.checksum = meta.checksum
        self.directive = directive
        self.created = created
        self.parent: ClusterBlock | None = None
        self.children: set[ClusterBlock] = set()
        self.told = False
        self.writing = False
        self.gone = False
        self.used = 0
        self.uses = 0
        self.inflation = 0.0

    @property
    def is_evictable(self) -> bool:
        return not self.children and not self.writing and not self.gone

    @property
    def meta(self) -> BlockMeta:
        return BlockMeta(self.key, self.parent_key, self.depth, self.checksum, self.directive)

    def record(self, unix_s: float) -> Kept:
        """``unix_s``: what to add to times of our clock."""
        directive = shifted(self.directive, unix_s)
        return Kept(self.key, self.parent_key, self.depth, self.checksum, self.created, directive)


class ClusterShelf:
    """The blocks of one model and layout."""

    def __init__(self, spec: PoolSpec, caps: PinCaps) -> None:
        self.spec = spec
        self.object_bytes = object_bytes(spec)
        self.caps = caps
        self.blocks: dict[bytes, ClusterBlock] = {}
        self.waiting: dict[bytes, set[ClusterBlock]] = {}
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []

    def stored(self, blocks: Iterable[ClusterBlock]) -> None:
        """Parents before their children. One event per piece in which each block is the parent of the next."""
        self._flush_removed()
        run: list[ClusterBlock] = []
        for block in blocks:
            if run and (block.parent_key != run[-1].key or len(run) >= _KEYS_PER_EVENT):
                self._events.append(_stored(run))
                run = []
            run.append(block)
        if run:
            self._events.append(_stored(run))

    def removed(self, keys: Iterable[bytes]) -> None:
        """Children before their parents."""
        for key in keys:
            self._removed.append(key)
            if len(self._removed) >= _KEYS_PER_EVENT:
                self._flush_removed()

    def take_events(self) -> list[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(Removed(keys=pack_keys(self._removed)))
            self._removed = []


class ClusterIndex:
    """See the module. Sync and without a clock: times are passed in."""

    def __init__(self, capacity_bytes: int, pin_share: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.blocks = 0
        self._pin_share = pin_share
        self._shelves: dict[PoolSpec, ClusterShelf] = {}
        self._order: EvictionOrder[ClusterBlock] = EvictionOrder(lambda: self.blocks)

    def __iter__(self) -> Iterator[ClusterShelf]:
        return iter(self._shelves.values())

    def shelf(self, spec: PoolSpec) -> ClusterShelf:
        shelf = self._shelves.get(spec)
        if shelf is None:
            caps = PinCaps(self.capacity_bytes // object_bytes(spec), self._pin_share)
            shelf = self._shelves[spec] = ClusterShelf(spec, caps)
        return shelf

    def find(self, spec: PoolSpec, key: bytes) -> ClusterBlock | None:
        shelf = self._shelves.get(spec)
        return None if shelf is None else shelf.blocks.get(key)

    def run(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a piece of a chain are here."""
        for position, key in enumerate(keys):
            block = self.find(spec, key)
            if block is None or block.writing:
                return position
        return len(keys)

    def insert(self, spec: PoolSpec, meta: BlockMeta, now_s: float, *, created: bool) -> ClusterBlock:
        """A block that is on its way (`landed`, or `remove`). It takes room at once; see `make_room`."""
        shelf = self.shelf(spec)
        directive, _ = apply(shelf.caps, meta.key, None, meta.directive, now_s)
        block = ClusterBlock(shelf, meta, directive, created=created)
        block.writing = True
        block.parent = shelf.blocks.get(meta.parent)
        if block.parent is not None:
            block.parent.children.add(block)
        elif meta.parent != ROOT:
            shelf.waiting.setdefault(meta.parent, set()).add(block)
        for child in shelf.waiting.pop(meta.key, ()):
            child.parent = block
            block.children.add(child)
        shelf.blocks[meta.key] = block
        self.blocks += 1
        self.used_bytes += shelf.object_bytes
        return block

    def landed(self, blocks: Sequence[ClusterBlock]) -> None:
        """They lie in the store. Parents before their children."""
        self._order.begin_use()
        for block in blocks:
            block.writing = False
        for block in blocks:
            self._order.use(block)
            if not block.told and _may_be_told(block):
                self._tell(block)

    def use(self, blocks: Iterable[ClusterBlock]) -> None:
        self._order.begin_use()
        for block in blocks:
            self._order.use(block)

    def direct(self, block: ClusterBlock, said: Directive, now_s: float) -> bool:
        """A use says this of the block; was a pin refused?"""
        block.directive, refused = apply(block.shelf.caps, block.key, block.directive, said, now_s)
        self._order.offer(block)
        return refused

    def make_room(self, now_s: float, *, spare_pinned: bool) -> tuple[list[ClusterBlock], bool]:
        """Evict until what is here fits. The evicted, and whether that was enough."""
        evicted: list[ClusterBlock] = []
        while self.used_bytes > self.capacity_bytes:
            block = self._order.pop(now_s, spare_pinned=spare_pinned)
            if block is None:
                return evicted, False
            evicted.append(block)
            self.remove(block)
        return evicted, True

    def kind(self, block: ClusterBlock) -> str:
        """The class it was evicted from."""
        return self._order.kind(block)

    def remove(self, block: ClusterBlock) -> None:
        """It is not in the store any more, or not ours to answer for. What is below it waits, untold."""
        if block.gone:
            return
        self._untell(block)
        shelf = block.shelf
        block.gone = True
        del shelf.blocks[block.key]
        shelf.caps.forget(block.key)
        if block.children:
            shelf.waiting.setdefault(block.key, set()).update(block.children)
            for child in block.children:
                child.parent = None
            block.children = set()
        if block.parent is not None:
            block.parent.children.discard(block)
            self._order.offer(block.parent)
            block.parent = None
        elif block.parent_key != ROOT:
            others = shelf.waiting[block.parent_key]
            others.discard(block)
            if not others:
                del shelf.waiting[block.parent_key]
        self.blocks -= 1
        self.used_bytes -= shelf.object_bytes

    def take_events(self) -> list[tuple[PoolSpec, list[KvEvent]]]:
        taken = [(shelf.spec, shelf.take_events()) for shelf in self]
        return [(spec, events) for spec, events in taken if events]

    def check_integrity(self) -> None:
        count = size = 0
        for shelf in self:
            for block in shelf.blocks.values():
                count, size = count + 1, size + shelf.object_bytes
                assert block.parent is shelf.blocks.get(block.parent_key)
                assert not block.gone
                assert block.told == (not block.writing and _may_be_told(block))
                if block.parent is not None:
                    assert block in block.parent.children
                elif block.parent_key != ROOT:
                    assert block in shelf.waiting[block.parent_key]
            assert all(shelf.waiting.values())
        assert (count, size) == (self.blocks, self.used_bytes)
        assert self._order.offered() == {b for shelf in self for b in shelf.blocks.values() if b.is_evictable}

    def _tell(self, block: ClusterBlock) -> None:
        told = _subtree(block, lambda b: not b.writing)
        for each in told:
            each.told = True
        block.shelf.stored(told)

    def _untell(self, block: ClusterBlock) -> None:
        """Nothing is told of whose prefix is not here."""
        if not block.told:
            return
        untold = _subtree(block, lambda b: b.told)
        for each in untold:
            each.told = False
        block.shelf.removed(b.key for b in reversed(untold))


def _subtree(top: ClusterBlock, among: Callable[[ClusterBlock], bool] = lambda _: True) -> list[ClusterBlock]:
    """Parents before their children; what is below one that is not ``among`` them is left out, too."""
    blocks: list[ClusterBlock] = []
    stack = [top]
    while stack:
        block = stack.pop()
        if among(block):
            blocks.append(block)
            stack += block.children if len(block.children) < 2 else sorted(block.children, key=lambda b: b.key)
    return blocks


def _may_be_told(block: ClusterBlock) -> bool:
    return block.parent_key == ROOT or (block.parent is not None and block.parent.told)


def _stored(run: Sequence[ClusterBlock]) -> Stored:
    return Stored(parent=run[0].parent_key, keys=pack_keys(block.key for block in run))
