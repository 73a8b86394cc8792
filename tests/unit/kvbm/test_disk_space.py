"""Whose segment gives way on a full disk."""

from collections.abc import ValuesView

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import PLAIN, PinCaps
from kvbus_kvbm.core.disk_blocks import DiskBlock
from kvbus_kvbm.core.disk_shelf import Shelf
from kvbus_kvbm.core.disk_space import DiskLimits, DiskSpace
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import PoolSpec

SLOT_BYTES = 4096
SEGMENTS = 4
SLOTS = 3


class CountedBlocks(dict[bytes, DiskBlock]):
    """The blocks of a shelf, and how often all of them were gone through."""

    passes = 0

    def values(self) -> ValuesView[DiskBlock]:  # type: ignore[override]
        self.passes += 1
        return super().values()


def _shelf(model: str) -> Shelf:
    return Shelf(PoolSpec(model, "l", SLOT_BYTES, 16), SLOT_BYTES, PinCaps(100, 0.5), {}, 0.0)


def _full_disk() -> tuple[DiskSpace, Shelf, Shelf, list[DiskBlock]]:
    """A shelf whose segments take all the disk, one without any, and the blocks of the first in the order of their places."""
    full, empty = _shelf("full"), _shelf("empty")
    for _ in range(SEGMENTS):
        full.add_segment(SLOTS)
    blocks = []
    for number in range(SEGMENTS * SLOTS):
        block = full.place(BlockMeta(number.to_bytes(16, "big"), ROOT, 0, 0, PLAIN), 0.0)
        full.keep(block, full.record_of(block))
        blocks.append(block)
    space = DiskSpace(DiskLimits(capacity_bytes=SEGMENTS * SLOTS * SLOT_BYTES, segment_bytes=SLOTS * SLOT_BYTES))
    space.shelves = {full.spec: full, empty.spec: empty}
    return space, full, empty, blocks


def test_a_segment_whose_slots_are_in_use_does_not_give_way() -> None:
    space, full, empty, blocks = _full_disk()
    full.hold(blocks[:1])  # read
    full.hold(blocks[SLOTS : SLOTS + 1])
    full.remove(blocks[SLOTS])  # read, and no longer in the index
    full.remove(blocks[2 * SLOTS])
    full.place(BlockMeta(b"w" * 16, ROOT, 0, 0, PLAIN), 0.0)  # written
    assert space.victim(empty, 1.0) == (full, full.segments[4])
    full.hold(blocks[-1:])
    assert space.victim(empty, 1.0) is None
    full.let_go(blocks[SLOTS : SLOTS + 1])
    assert space.victim(empty, 1.0) == (full, full.segments[2])


def test_the_blocks_are_gone_through_once_however_many_segments_are_in_use() -> None:
    space, full, empty, blocks = _full_disk()
    full.hold(blocks)
    counted = full._blocks = CountedBlocks(full._blocks)
    assert space.victim(empty, 1.0) is None
    assert counted.passes == 1
