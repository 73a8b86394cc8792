"""What a pool may hold, what it has counted, and what its slots are used for."""

import msgspec


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``quarantine_s``: how long a slot rests after a write lease that ended without an answer. ``pin_share``: of the slots, that
    directives of one tenant may pin. ``lru``: directives and values count nothing (to compare with)."""

    lease_s: float
    quarantine_s: float
    max_leases_per_instance: int
    max_keys_per_request: int
    pin_share: float = 0.5
    lru: bool = False


class PoolCounters(msgspec.Struct):
    """Totals since the pool was made, in blocks; ``leases_expired`` in leases. ``unpinned``: pins that a tenant's share did not
    allow; ``freed``: dropped on request."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted_ephemeral: int = 0
    evicted_normal: int = 0
    evicted_pinned: int = 0
    refused: int = 0
    unpinned: int = 0
    freed: int = 0
    corrupt: int = 0
    leases_granted: int = 0
    leases_expired: int = 0

    @property
    def evictions(self) -> int:
        return self.evicted_ephemeral + self.evicted_normal + self.evicted_pinned


class PoolUsage(msgspec.Struct, frozen=True):
    """Slots by what they are used for (``pinned`` ones are among ``present``, or dropped and still read), and living leases.
    ``retained``: pinned by directives."""

    slots: int
    free: int
    present: int
    reserved: int
    pinned: int
    quarantined: int
    leases: int
    retained: int = 0
