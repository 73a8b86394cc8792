"""What the tiers below G2 are to the rest of kvbm: G3, the disk of this host, and G4, the store of the cluster.

A tier that has trouble (a full or dying disk, a store that does not answer) is bypassed: its methods report misses, within a
deadline, and never raise for it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_wire.kv_events import KvEvent


class BlockMeta(msgspec.Struct, frozen=True):
    """A block without its data. ``depth``: blocks before it in its chain. ``checksum``: XXH3-64 of its bytes. Times of the
    directive are those of the clock that kvbm runs by (`time.monotonic`); what outlives the process is written in unix time."""

    key: bytes
    parent: bytes
    depth: int
    checksum: int
    directive: Directive = Directive()


class TierUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``available``: false while the tier is bypassed."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    available: bool = True


class TierCounters(msgspec.Struct):
    """Totals since the start: blocks, but bytes and seconds where the name says so. ``evictions``: by class."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0
    failures: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    evictions: dict[str, int] = {}


Changed = Callable[[PoolSpec, Sequence[KvEvent]], None]
"""Hears what a tier has stored and lost, in order (Stored parents first, Removed children first), on the event loop."""


class LowerTier(Protocol):
    """One tier of all models. Called on the event loop. Every wait has an end: ``deadline`` settings of the tier itself."""

    @property
    def name(self) -> str:
        """``g3`` or ``g4``."""

    @property
    def counters(self) -> TierCounters: ...

    def usage(self) -> TierUsage: ...

    async def start(self) -> None:
        """Recover what is there. A tier that cannot be used at all raises `StorageRefused` (a person has to correct it)."""

    async def close(self) -> None:
        """Everything written so far is on its medium. Idempotent."""

    def find(self, spec: PoolSpec, key: bytes) -> BlockMeta | None:
        """A block that this instance answers for (has announced by events)."""

    async def leading(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        """How many leading blocks of this piece of a chain can probably be read. G4 asks its store, so also others' blocks
        count."""

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        """Store blocks, parents before children; room is made by eviction. False: not stored. A block that is there already
        counts as stored, and its directive is renewed. ``data`` is not used after the call has returned, also when it is
        cancelled."""

    async def read(self, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        """Read leading blocks of a piece of a chain. Those in the answer lie in ``into``, and their checksums were verified
        there. What does not verify is dropped and counted. ``into`` is not written after the call has returned, also when it
        is cancelled."""

    async def retain(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> list[int]:
        """Set the directives of those blocks that are here; positions that were to be pinned and are not, for the tenant's
        share."""

    async def drop(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        """Free these blocks, in any order; those with others below them stay. How many were freed."""

    async def verify(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        """Read these blocks and drop those that do not hold; which ones."""
