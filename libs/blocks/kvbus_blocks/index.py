"""The seam of the prefix index: who holds how much of a chain of blocks.

An index knows blocks by the low 64 bits of their keys (`kvbus_wire.packing.short_keys`): a collision costs a wrong guess, never a
wrong reuse, because engines and tiers compare all 128 bits. Keys are chained, so a block has exactly one parent.

A block counts for an owner only while the owner holds its whole prefix, too. That is what allows a jump search. Blocks whose
prefix is (not yet, or no longer) held are *orphans*: they are kept apart, found by no search, and count again as soon as the
missing parents are stored. So the order in which an owner stores and evicts does not matter.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Owner(NamedTuple):
    """One tier (``g1`` .. ``g4``) of one instance."""

    instance_id: str
    tier: str


class StoreOutcome(NamedTuple):
    """``added``: entries that are new. ``orphans``: of the given keys, how many no search can reach now.

    ``collisions``: keys that were refused because the index knows them below another parent, or because they follow such a key.
    """

    added: int = 0
    orphans: int = 0
    collisions: int = 0


class IndexSizes(NamedTuple):
    """``blocks``: distinct keys; ``entries``: (owner, block) pairs, what memory grows with; ``orphans``: entries out of reach."""

    blocks: int
    entries: int
    owners: int
    orphans: int


class Held(NamedTuple):
    """A copy of what one owner holds, orphans included, in no order. Both are arrays of type ``Q`` and equally long.

    ``parents[i]`` lies above ``keys[i]``; a first block, which has none, is its own parent (no block can be that otherwise).
    """

    keys: "array[int]"
    parents: "array[int]"


class IndexMemory(NamedTuple):
    """``owner_sets``: distinct sets of owners that blocks have; ``size_bytes``: what the index takes, roughly."""

    owner_sets: int
    size_bytes: int


class PrefixIndex(Protocol):
    """One model's index. `FlashIndex` may be used by several threads, `PlainIndex` may not."""

    def store(self, owner: Owner, parent: int | None, keys: Sequence[int]) -> StoreOutcome:
        """The owner holds ``keys``, one after the other below ``parent`` (None: the root). Idempotent."""

    def remove(self, owner: Owner, keys: Sequence[int]) -> int:
        """The owner holds these no more. Returns how many it had held; others are ignored."""

    def clear(self, owner: Owner) -> int:
        """The owner holds nothing. Returns how many entries went."""

    def drop(self, instance_id: str) -> int:
        """Clear all owners of an instance. Returns how many entries went."""

    def match(self, keys: Sequence[int]) -> Mapping[Owner, int]:
        """Depth of the leading part of the chain that each owner holds; only owners with at least 1.

        The chain must be one: of keys that do not follow each other any depth may be told. One key alone, wherever its block lies,
        tells who holds everything down to it.
        """

    def owners(self) -> list[Owner]:
        """All that hold something, in no order."""

    def held(self, owner: Owner) -> Held:
        """Everything that the owner holds, as of this moment. Storing each key below its parent, in any order, makes it again."""

    def sizes(self) -> IndexSizes:
        """In constant time. While another thread changes the index, the numbers may be of neighbouring moments."""

    def memory(self) -> IndexMemory:
        """In constant time."""

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
