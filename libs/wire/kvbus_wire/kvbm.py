"""Messages to the KV block manager of a host. Data never crosses the bus: workers map the pool's file and copy blocks themselves.

    offload:   ReserveBlocks -> copy into the slots -> CommitBlocks (with checksums)
    onboard:   PinBlocks -> copy out of the slots, check the checksums -> ReleaseLease
    retain:    RetainBlocks says, again with each use, how long blocks are worth keeping

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


class BlockDirective(Part, frozen=True):
    """How long the blocks [``start``, ``end``) of a message's ``keys`` are worth keeping; of several the last one counts.

    ``kind``: pinned (they stay for ``ttl_s``, as far as the tenant's share goes), normal, or ephemeral (the first to go, never
    below G2). ``priority``: higher stays longer. ``ttl_s``: from when the message arrives; None: for good.
    """

    start: int
    end: int
    kind: str = "normal"
    priority: int = 0
    ttl_s: float | None = None
    tenant: str = ""


class ReserveBlocks(Message, frozen=True):
    """Room for a chain of blocks below ``parent``. ``keys``: packed."""

    pool_id: str
    instance_id: str
    parent: bytes
    keys: bytes
    directives: tuple[BlockDirective, ...] = ()


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
    """Make the leading blocks of ``keys`` (packed) readable until the lease ends.

    Blocks behind those in G2 that lie in lower tiers are brought up meanwhile; ``wait_s``: how long to wait for the first of them
    when none lies in G2 (0: not at all, and nothing is brought up). ``parent``: the block before them; without it blocks in the
    middle of a chain are found only where kvbm knows their beginning. ``tiers``: of the lower ones only these are read for it
    (empty: all).
    """

    pool_id: str
    instance_id: str
    keys: bytes
    wait_s: float = 0.0
    parent: bytes = b""
    tiers: tuple[str, ...] = ()


class PinnedBlocks(Message, frozen=True):
    """``slots`` of the leading blocks that are there; none: no lease was made and ``lease_id`` is empty. ``coming``: so many more
    are on their way from lower tiers (ask again, for what follows).

    ``brought``: so many of ``slots`` came up from which tier for this reader; the others were in G2. ``awaits``: the tier that
    is being read for what is coming (empty: none yet)."""

    lease_id: str
    lease_s: float
    slots: tuple[Slot, ...]
    coming: int = 0
    brought: dict[str, int] = {}
    awaits: str = ""


class ReleaseLease(Message, frozen=True):
    """Idempotent. ``corrupt``: positions of blocks whose checksum did not hold; kvbm drops them."""

    lease_id: str
    corrupt: tuple[int, ...] = ()


class RetainBlocks(Message, frozen=True):
    """What ``directives`` say of the blocks ``keys`` (packed, a chain from the root on) holds from now on, in all tiers. Sent with
    each use, which renews leases. Blocks that are not here yet get theirs when they are stored (ReserveBlocks)."""

    pool_id: str
    instance_id: str
    keys: bytes
    directives: tuple[BlockDirective, ...]


class Retained(Message, frozen=True):
    """``unpinned``: positions of blocks that were to be pinned and got a mere priority, since the tenant's share is used up."""

    unpinned: tuple[int, ...] = ()


class DropBlocks(Message, frozen=True):
    """Nobody needs these blocks any more (packed, in any order, each without what hangs below it unless that is named, too): free
    them now, in all tiers. On the control subject of workers and of kvbm. What is in use or has other blocks below it stays."""

    model: str
    keys: bytes


class DroppedBlocks(Message, frozen=True):
    """How many blocks were freed, by tier."""

    blocks: dict[str, int]
