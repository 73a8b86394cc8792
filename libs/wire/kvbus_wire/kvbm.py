"""Messages to the KV block manager of a host. Data never crosses the bus: workers map the pool's file and copy blocks themselves.

    offload:   ReserveBlocks -> copy into the slots -> CommitBlocks (with checksums)
    onboard:   PinBlocks -> copy out of the slots, check the checksums -> ReleaseLease

Every lease has a deadline, after which kvbm frees what it holds: a crashed worker leaks nothing.
"""

from kvbus_wire.message import Message, Part


class AttachPool(Message, frozen=True):
    """Open (or create) the pool for blocks of one layout. ``block_bytes``: size of one block."""

    instance_id: str
    incarnation: int
    model: str
    kv_layout: str
    block_bytes: int
    block_size: int = 16


class AttachedPool(Message, frozen=True):
    """``path``: file to map; slot i lies at ``i * slot_bytes``. ``pool_id`` changes when kvbm restarts: attach again."""

    pool_id: str
    path: str
    slot_bytes: int
    slots: int


class Slot(Part, frozen=True):
    """Where a block lies. ``generation`` grows whenever the slot is used anew; ``checksum``: XXH3-64 of the block's bytes."""

    index: int
    generation: int
    checksum: int = 0


class ReserveBlocks(Message, frozen=True):
    """Room for a chain of blocks below ``parent``. ``keys``: packed."""

    pool_id: str
    instance_id: str
    parent: bytes
    keys: bytes


class ReservedBlocks(Message, frozen=True):
    """``slots[i]`` is None when block i is not wanted: it is there already, or there is no room for it."""

    lease_id: str
    lease_s: float
    slots: tuple[Slot | None, ...]


class CommitBlocks(Message, frozen=True):
    """``checksums[i]`` None: block i was not written. Ends the lease."""

    lease_id: str
    checksums: tuple[int | None, ...]


class PinBlocks(Message, frozen=True):
    """Make the leading blocks of ``keys`` (packed) readable until the lease ends."""

    pool_id: str
    instance_id: str
    keys: bytes


class PinnedBlocks(Message, frozen=True):
    """``slots`` of the leading blocks that are there; none: no lease was made and ``lease_id`` is empty."""

    lease_id: str
    lease_s: float
    slots: tuple[Slot, ...]


class ReleaseLease(Message, frozen=True):
    """Idempotent. ``corrupt``: positions of blocks whose checksum did not hold; kvbm drops them."""

    lease_id: str
    corrupt: tuple[int, ...] = ()
