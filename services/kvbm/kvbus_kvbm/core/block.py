"""One block of a pool."""

from enum import IntEnum

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive


class State(IntEnum):
    """``WRITTEN``: committed, but an ancestor is not there yet; it becomes PRESENT with its ancestor, or goes with it."""

    RESERVED = 0
    WRITTEN = 1
    PRESENT = 2


class Block:
    """A slot's content. ``detached``: no longer in the index; the slot stays taken while someone reads or writes it."""

    __slots__ = (
        "below",
        "checksum",
        "children",
        "depth",
        "detached",
        "directive",
        "generation",
        "inflation",
        "key",
        "parent",
        "pins",
        "slot",
        "source",
        "state",
        "used",
        "uses",
        "writing",
    )

    def __init__(self, key: bytes, parent: "Block | None", slot: int, generation: int) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.generation = generation
        self.checksum = 0
        self.state = State.RESERVED
        self.pins = 0
        self.writing = True
        self.detached = False
        self.used = 0
        self.uses = 0
        self.inflation = 0.0
        self.depth: int = 0 if parent is None or parent.slot < 0 else parent.depth + 1
        self.directive = Directive()
        # Tiers that have it although they do not answer for it: another host has written it there.
        self.below: frozenset[str] = frozenset()
        # The tier it was brought up from for its next reader.
        self.source = "g2"
        self.children: set[Block] = set()

    @classmethod
    def root(cls) -> "Block":
        """The parent of all first blocks: always present, without a slot, never evicted."""
        root = cls(ROOT, None, -1, 0)
        root.state = State.PRESENT
        root.writing = False
        return root

    @property
    def is_evictable(self) -> bool:
        return (
            self.state is State.PRESENT
            and not self.pins
            and not self.children
            and not self.detached
            and self.parent is not None
        )

    def subtree(self) -> "list[Block]":
        """This block and all below it, parents before their children, each run of single children in one piece."""
        blocks: list[Block] = []
        stack = [self]
        while stack:
            block = stack.pop()
            blocks.append(block)
            stack += block.children if len(block.children) < 2 else sorted(block.children, key=_by_use)
        return blocks


def _by_use(block: Block) -> tuple[int, bytes]:
    return block.used, block.key
