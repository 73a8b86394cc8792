"""How the bytes of G3 are divided among the models: in segments, taken when they are needed."""

import msgspec

from kvbus_blocks.retention import effective
from kvbus_kvbm.core.disk_shelf import Segment, Shelf
from kvbus_kvbm.core.pools import PoolSpec

# What O_DIRECT wants lengths and places to be a multiple of, on every disk we know.
DISK_ALIGN_BYTES = 4096


class DiskLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``deadline_s`` and ``min_bytes_per_s``: an operation of n bytes may take ``deadline_s + n / min_bytes_per_s``.
    ``start_s``: how long the start waits for the disk. ``rest_s``: how long a disk in trouble is left alone.
    ``keep_free_bytes``: what of the file system is never taken. ``pin_share``: part of the capacity that one tenant's pinned
    blocks may take."""

    capacity_bytes: int
    segment_bytes: int = 256 << 20
    keep_free_bytes: int = 1 << 30
    start_s: float = 60.0
    deadline_s: float = 2.0
    min_bytes_per_s: float = 50e6
    failures: int = 3
    rest_s: float = 5.0
    read_threads: int = 4
    io_bytes: int = 2 << 20
    max_waiting: int = 256
    pin_share: float = 0.25

    def allowed_s(self, size_bytes: int) -> float:
        return self.deadline_s + size_bytes / self.min_bytes_per_s


def disk_slot_bytes(spec: PoolSpec) -> int:
    return -(-spec.block_bytes // DISK_ALIGN_BYTES) * DISK_ALIGN_BYTES


class DiskSpace:
    """All shelves. One that nobody has used since the start gives way to any other; of those in use, one that has more than its
    even share gives way to one that has less."""

    def __init__(self, limits: DiskLimits) -> None:
        self._limits = limits
        self.shelves: dict[PoolSpec, Shelf] = {}

    @property
    def used_bytes(self) -> int:
        return sum(shelf.size_bytes for shelf in self.shelves.values())

    def grow(self, shelf: Shelf) -> Segment | None:
        """A new segment of what nobody has yet. None: too little is left."""
        left = self._limits.capacity_bytes - self.used_bytes
        slots = min(max(self._limits.segment_bytes, shelf.slot_bytes), left) // shelf.slot_bytes
        return shelf.add_segment(slots) if slots > 0 else None

    def victim(self, shelf: Shelf, now_s: float) -> tuple[Shelf, Segment] | None:
        """Whose segment goes so that ``shelf`` can grow: the one with the fewest pinned blocks, then with the fewest at all.

        Pins lie anywhere after a while, so they cannot keep a model that has too little from getting its share.
        """
        users = sum(other.in_use or other is shelf for other in self.shelves.values())
        share = self._limits.capacity_bytes // users
        if shelf.size_bytes + shelf.slot_bytes > share:
            return None
        giving = [s for s in self.shelves.values() if s is not shelf and s.segments]
        giving = [s for s in giving if not s.in_use or s.size_bytes > share]
        for other in sorted(giving, key=lambda s: (s.in_use, -s.size_bytes)):
            loads = _quiet_loads(other, now_s)
            if loads:
                return other, other.segments[min(loads, key=lambda number: loads[number])]
        return None

    def surplus(self) -> list[tuple[Shelf, Segment]]:
        """Segments to remove because the capacity was made smaller, those with the fewest blocks first."""
        over = self.used_bytes - self._limits.capacity_bytes
        every = [(shelf, segment) for shelf in self.shelves.values() for segment in shelf.segments.values()]
        every.sort(key=lambda pair: (pair[1].slots - len(pair[1].free)) * pair[0].slot_bytes)
        chosen: list[tuple[Shelf, Segment]] = []
        for shelf, segment in every:
            if over <= 0:
                break
            chosen.append((shelf, segment))
            over -= segment.size_bytes
        return chosen


def _quiet_loads(shelf: Shelf, now_s: float) -> dict[int, tuple[int, int, int]]:
    """Of each segment of which nobody reads or writes a slot: pinned blocks, blocks, and the negative sum of their depths: deep
    ones have the fewest below them. One pass over the blocks, which may be many: it runs on the event loop."""
    loads = dict.fromkeys(shelf.segments, (0, 0, 0))
    busy: set[int] = set()
    for block in shelf:
        if block.readers or not block.kept:
            busy.add(block.segment)
        pinned, count, height = loads[block.segment]
        is_pinned = effective(block.directive, now_s).kind == "pinned"
        loads[block.segment] = (pinned + is_pinned, count + 1, height - block.depth)
    # Taken slots without a block in the index are those of detached blocks that somebody still uses.
    for number, segment in shelf.segments.items():
        if number in busy or segment.slots - len(segment.free) != loads[number][1]:
            del loads[number]
    return loads
