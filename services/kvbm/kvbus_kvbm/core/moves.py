"""What a pool lets the tiering do with its blocks: hold them while they are read, and take in blocks that come from below.

Held blocks cannot be evicted; both kinds have no deadline, since the one who reads and writes them is kvbm itself.
"""

# ruff: noqa: S101 (check_integrity asserts)

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvbus_blocks.keys import ROOT
from kvbus_kvbm.core.block import Block, State
from kvbus_kvbm.core.lower import BlockMeta


class Home(Protocol):
    """The pool that the blocks are of."""

    @property
    def root(self) -> Block: ...

    def find(self, key: bytes) -> Block | None: ...

    def new_block(self, key: bytes, above: Block, *, spare_pinned: bool = False) -> Block | None: ...

    def take_pin(self, block: Block) -> None: ...

    def give_pin_back(self, block: Block) -> None: ...

    def adopt(self, blocks: Sequence[Block], metas: Sequence[BlockMeta], failed: Sequence[Block]) -> int: ...


class Moves:
    """Part of a `Pool`: it works on the pool's own state."""

    def __init__(self, pool: Home) -> None:
        self._pool = pool
        self._held: Counter[Block] = Counter()
        self._filling: set[Block] = set()

    @property
    def busy(self) -> int:
        """Blocks that are held or filled."""
        return len(self._held) + len(self._filling)

    def holds(self, block: Block) -> int:
        """How often a block is held."""
        return self._held[block]

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of this piece of a chain are present."""
        count = 0
        for key in keys:
            block = self._pool.find(key)
            if block is None or block.state is not State.PRESENT:
                break
            count += 1
        return count

    def hold(self, keys: Sequence[bytes]) -> list[Block]:
        """Keep those of the blocks that are present from being evicted, until `let_go`."""
        found = [self._pool.find(key) for key in keys]
        blocks = [block for block in found if block is not None and block.state is State.PRESENT]
        for block in blocks:
            self._held[block] += 1
            self._pool.take_pin(block)
        return blocks

    def let_go(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
            self._pool.give_pin_back(block)

    def make_room(self, parent: bytes, keys: Sequence[bytes]) -> list[Block]:
        """Slots for the leading blocks of ``keys`` below ``parent``, to be written by kvbm; `fill` ends it.

        Only what may be evicted and is not pinned by a directive gives way. Nothing is handed out from the first block on that is
        known already.
        """
        above = self._pool.find(parent) if parent != ROOT else self._pool.root
        taken: list[Block] = []
        for key in keys:
            if above is None or self._pool.find(key) is not None:
                break
            block = self._pool.new_block(key, above, spare_pinned=True)
            if block is None:
                break
            taken.append(block)
            above = block
        self._filling.update(taken)
        return taken

    def fill(self, blocks: Sequence[Block], metas: Sequence[BlockMeta]) -> int:
        """The leading blocks were written, as ``metas`` say; the others are dropped. How many became present."""
        self._filling.difference_update(blocks)
        good = 0
        for block, meta in zip(blocks, metas, strict=False):
            above = block.parent
            if meta.key != block.key or above is None or meta.parent != above.key:
                break
            good += 1
        return self._pool.adopt(blocks[:good], metas[:good], blocks[good:])

    def check_integrity(self) -> tuple[Counter[Block], set[Block]]:
        """The blocks held and filled, which the pool counts among its pins and writes."""
        assert all(count > 0 for count in self._held.values())
        assert all(block.writing for block in self._filling)
        return self._held.copy(), set(self._filling)
