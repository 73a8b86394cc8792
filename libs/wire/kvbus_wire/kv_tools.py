"""Looking into the tiers of a kvbm from outside: `kvbus kv`. All go to its control subject."""

from kvbus_wire.message import Message, Part


class DescribeTiers(Message, frozen=True):
    """What is in which tier, and how the tiers have done so far."""


class TierHolding(Part, frozen=True):
    """Blocks of one model and layout in a tier. ``pinned``: those that a living directive pins."""

    model: str
    kv_layout: str
    block_bytes: int
    block_size: int
    blocks: int
    pinned: int = 0


class TierState(Part, frozen=True):
    """``available``: false while the tier is bypassed. The counts are those since the start, in blocks; ``evictions``: by class."""

    tier: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    available: bool = True
    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0
    failures: int = 0
    evictions: dict[str, int] = {}
    holdings: tuple[TierHolding, ...] = ()


class DescribedTiers(Message, frozen=True):
    """``g4_store``: where G4 lies; empty without one."""

    instance_id: str
    host_id: str
    tiers: tuple[TierState, ...]
    g4_store: str = ""


class ListBlocks(Message, frozen=True):
    """The blocks of a model in a tier, in the order of their keys, from behind ``after`` on. ``limit``: at most so many, and at
    most as many as kvbm's settings say."""

    model: str
    tier: str
    after: bytes = b""
    limit: int = 1000


class InspectBlocks(Message, frozen=True):
    """Where the blocks ``keys`` (packed) of a model lie, and what is known of their future."""

    model: str
    keys: bytes


class BlockState(Part, frozen=True):
    """A block in a tier. ``ttl_s``: how long its directive holds; None: for good. ``users``: who reads or writes it now (G2)."""

    tier: str
    key: bytes
    parent: bytes
    depth: int
    kind: str = "normal"
    priority: int = 0
    ttl_s: float | None = None
    tenant: str = ""
    users: int = 0


class ListedBlocks(Message, frozen=True):
    """``after``: ask on from there; empty at the end."""

    blocks: tuple[BlockState, ...]
    after: bytes = b""


class VerifyBlocks(Message, frozen=True):
    """Read blocks of a model in a tier, in the order of their keys from behind ``after`` on, and drop those that do not hold. One
    piece per request; kvbm's settings say how large it is at most."""

    model: str
    tier: str
    after: bytes = b""
    limit: int = 1000


class VerifiedBlocks(Message, frozen=True):
    """``bad``: packed keys of those that were dropped. ``after``: ask on from there; empty at the end."""

    checked: int
    bad: bytes = b""
    after: bytes = b""


class EvictBlocks(Message, frozen=True):
    """Free the blocks ``keys`` (packed) of a model in one tier, whatever their directives say; the other tiers keep them. What is
    in use or has others below it stays. Answered by DroppedBlocks."""

    model: str
    tier: str
    keys: bytes


class WarmBlocks(Message, frozen=True):
    """Bring a chain (packed, from its root on) up into G2. ``wait_s``: how long to wait for that."""

    model: str
    keys: bytes
    wait_s: float = 0.0


class WarmedBlocks(Message, frozen=True):
    """Leading blocks that are in G2 now, and that are on their way there."""

    present: int
    coming: int = 0
