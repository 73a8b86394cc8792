"""Which slot of a pool is whose: each is free, resting, or of one block."""

# ruff: noqa: S101 (check_integrity asserts)

from collections import deque
from collections.abc import Iterator

from kvbus_kvbm.core.block import Block


class SlotTable:
    """Generations rise with each use of a slot."""

    def __init__(self, slots: int) -> None:
        self._owners: list[Block | None] = [None] * slots
        self._generations = [0] * slots
        # First in, first out: a freed slot is left alone as long as possible, which helps readers that are late.
        self._free: deque[int] = deque(range(slots))
        self._quarantine: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        return len(self._quarantine)

    def held(self) -> Iterator[Block]:
        """The blocks with a slot, also dropped ones that are still used."""
        return (block for block in self._owners if block is not None)

    def new_block(self, key: bytes, above: Block) -> Block:
        """A block in a free slot; there must be one."""
        slot = self._free.popleft()
        self._generations[slot] += 1
        block = Block(key, above, slot, self._generations[slot])
        self._owners[slot] = block
        return block

    def free_if_unused(self, block: Block, rest_until_s: float | None = None) -> None:
        """Call when a block was dropped, or lost a user. ``rest_until_s``: its writer may still be at it until then."""
        if not block.detached or block.writing or block.pins or self._owners[block.slot] is not block:
            return
        self._owners[block.slot] = None
        if rest_until_s is None:
            self._free.append(block.slot)
        else:
            self._quarantine.append((rest_until_s, block.slot))

    def expire(self, now_s: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now_s:
            self._free.append(self._quarantine.popleft()[1])

    def next_due_s(self) -> float | None:
        return self._quarantine[0][0] if self._quarantine else None

    def check_integrity(self) -> None:
        owned = [block.slot for block in self.held()]
        resting = [slot for _, slot in self._quarantine]
        assert sorted([*self._free, *resting, *owned]) == list(range(len(self))), "a slot is lost or has two owners"
        for slot, owner in enumerate(self._owners):
            assert owner is None or (owner.slot, owner.generation) == (slot, self._generations[slot])
        assert all(not block.detached or block.pins or block.writing for block in self.held()), (
            "a dropped block keeps its slot"
        )
