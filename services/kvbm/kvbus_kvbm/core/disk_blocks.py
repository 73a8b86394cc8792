"""A block on the disk, and what changed about the blocks of one model there."""

from collections.abc import Iterable, Iterator, Sequence

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.packing import pack_keys

# An event has to fit into a message.
_KEYS_PER_EVENT = 8192


class DiskBlock:
    """``kept``: its data and its record are on the disk. ``present``: kept, and so is its whole prefix; that is what others are
    told of. ``parent`` is None for a first block, and for one whose parent is not here. ``detached``: no longer in the index; the
    slot stays taken while somebody reads or writes it, until ``freed``."""

    __slots__ = (
        "checksum",
        "children",
        "depth",
        "detached",
        "directive",
        "freed",
        "inflation",
        "kept",
        "key",
        "parent",
        "parent_key",
        "present",
        "readers",
        "segment",
        "slot",
        "used",
        "uses",
        "writing",
    )

    def __init__(self, meta: BlockMeta, segment: int, slot: int) -> None:
        self.key = meta.key
        self.parent_key = meta.parent
        self.depth = meta.depth
        self.checksum = meta.checksum
        self.directive: Directive = meta.directive
        self.segment = segment
        self.slot = slot
        self.parent: DiskBlock | None = None
        self.children: set[DiskBlock] = set()
        self.kept = False
        self.present = False
        self.writing = False
        self.detached = False
        self.freed = False
        self.readers = 0
        self.used = 0
        self.uses = 0
        self.inflation = 0.0

    @property
    def is_evictable(self) -> bool:
        return self.kept and not self.readers and not self.children and not self.detached

    @property
    def meta(self) -> BlockMeta:
        return BlockMeta(self.key, self.parent_key, self.depth, self.checksum, self.directive)

    def subtree(self) -> "list[DiskBlock]":
        """This block and all below it, parents before their children."""
        blocks: list[DiskBlock] = []
        stack = [self]
        while stack:
            block = stack.pop()
            blocks.append(block)
            stack += block.children if len(block.children) < 2 else sorted(block.children, key=_by_key)
        return blocks


class DiskChanges:
    """KV events in order, with neighbouring removals in one."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []

    def stored(self, blocks: Iterable[DiskBlock]) -> None:
        """Parents before their children."""
        self._flush_removed()
        for run in _runs(blocks):
            self._events.append(Stored(parent=run[0].parent_key, keys=pack_keys(block.key for block in run)))

    def removed(self, blocks: Iterable[DiskBlock]) -> None:
        """Children before their parents."""
        for block in blocks:
            self._removed.append(block.key)
            if len(self._removed) >= _KEYS_PER_EVENT:
                self._flush_removed()

    def take(self) -> Sequence[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(Removed(keys=pack_keys(self._removed)))
            self._removed = []


def _runs(blocks: Iterable[DiskBlock]) -> Iterator[list[DiskBlock]]:
    """Pieces in which each block is the parent of the next."""
    run: list[DiskBlock] = []
    for block in blocks:
        if run and (block.parent_key != run[-1].key or len(run) >= _KEYS_PER_EVENT):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _by_key(block: DiskBlock) -> bytes:
    return block.key
