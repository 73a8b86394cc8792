"""Invariants of a pool's blocks, for tests."""

# ruff: noqa: S101 (check_integrity asserts)

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from kvbus_kvbm.core.block import Block, State
from kvbus_kvbm.core.leases import Lease


def check_tree(root: Block, blocks: Mapping[bytes, Block], held: Set[Block]) -> None:
    """``held``: the blocks with a slot."""
    for key, block in blocks.items():
        above = block.parent
        assert (key, False) == (block.key, block.detached)
        assert block in held
        assert above is not None
        assert block in above.children
        assert above is root or blocks.get(above.key) is above
        assert block.depth == (0 if above is root else above.depth + 1)
        assert block.writing == (block.state is State.RESERVED)
        assert (block.state is State.PRESENT) <= (above.state is State.PRESENT), "present without its prefix"
        assert (block.state is State.WRITTEN) <= (above.state is not State.PRESENT), "written below a present block"
    for block in [root, *blocks.values()]:
        assert all(child.parent is block and not child.detached for child in block.children)


def check_users(held: Set[Block], leases: Sequence[Lease], held_up: Counter[Block], filling: Set[Block]) -> None:
    """``held_up``, ``filling``: what kvbm itself reads and writes."""
    pins = Counter(block for lease in leases if not lease.is_write for block in lease.held()) + held_up
    writes = Counter(block for lease in leases if lease.is_write for block in lease.held()) + Counter(filling)
    assert {block: block.pins for block in held if block.pins} == pins
    assert Counter(block for block in held if block.writing) == writes
