"""One block of a pool, and the order in which blocks are evicted."""

import heapq
from collections.abc import Callable
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
        "key",
        "parent",
        "pins",
        "slot",
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
        self.depth: int = 0 if parent is None or parent.slot < 0 else parent.depth + 1
        self.directive = Directive()
        # Tiers that have it although they do not answer for it: another host has written it there.
        self.below: frozenset[str] = frozenset()
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


class EvictionOrder:
    """Least recently used first, among the blocks that may go (leaves that nobody uses).

    A heap with lazy deletion: whoever makes a block evictable offers it, and what is no longer true is skipped when it comes
    up. It holds at most ``2 * live blocks + 64`` entries.
    """

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._heap: list[tuple[int, int, Block]] = []
        self._offers = 0

    def __len__(self) -> int:
        """Entries, also those that are no longer true."""
        return len(self._heap)

    def offer(self, block: Block) -> None:
        """Call whenever a block may have become evictable or was used."""
        if not block.is_evictable:
            return
        self._offers += 1
        heapq.heappush(self._heap, (block.used, self._offers, block))
        if len(self._heap) > 2 * self._live() + 64:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)

    def pop(self, protected: Block) -> Block | None:
        """The next block to evict, never ``protected``; None when nothing may go."""
        kept: tuple[int, int, Block] | None = None
        victim: Block | None = None
        while self._heap and victim is None:
            entry = heapq.heappop(self._heap)
            if not self._holds(entry):
                continue
            if entry[2] is protected:
                kept = entry
            else:
                victim = entry[2]
        if kept is not None:
            heapq.heappush(self._heap, kept)
        return victim

    def offered(self) -> set[Block]:
        """The blocks it would evict sooner or later."""
        return {entry[2] for entry in self._heap if self._holds(entry)}

    @staticmethod
    def _holds(entry: tuple[int, int, Block]) -> bool:
        used, _, block = entry
        return block.used == used and block.is_evictable
