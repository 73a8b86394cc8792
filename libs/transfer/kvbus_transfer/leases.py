"""The leases that an agent has granted: pure, the clock is passed in.

A lease ends once: by `end` (released) or by its time. Ids are never used again, so a table entry that still shows the id of a
lease says that it never ended: that is what readers of shared or remote memory check *after* a copy (`LeaseTable`).
"""

# ruff: noqa: S101 (check_integrity consists of assertions)
import heapq
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from kvbus_transfer.errors import GrantRefused, LimitReached, Refusal

# Remembered so that a late reader is told "expired" and not "unknown".
_ENDED_KEPT = 4096


class LeaseEnd(StrEnum):
    RELEASED = "released"
    FINISHED = "finished"
    EXPIRED = "expired"
    STOPPED = "stopped"


class Lease(msgspec.Struct):
    """``regions``: those with a grant under it. ``slot``: its entry in the table."""

    lease_id: int
    slot: int
    peer: str
    expires_s: float
    regions: set[int] = msgspec.field(default_factory=set)


class LeaseTable(Protocol):
    """Unsigned 64-bit numbers in memory that readers see."""

    def __len__(self) -> int: ...
    def __getitem__(self, slot: int, /) -> int: ...
    def __setitem__(self, slot: int, lease_id: int, /) -> None: ...


class LeaseBook:
    """``table[slot]`` holds the id of the lease that lives there, 0 when none does. It is cleared before `end` returns."""

    def __init__(self, table: LeaseTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        self._free = list(range(len(table) - 1, -1, -1))
        self._heap: list[tuple[float, int]] = []
        self._ended: dict[int, LeaseEnd] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease_s: float, peer: str) -> Lease:
        """Raise LimitReached."""
        if not self._free:
            raise LimitReached(f"{len(self._leases)} leases are granted already", own=True)
        self._last_id += 1
        lease = Lease(self._last_id, self._free.pop(), peer, self._clock() + lease_s)
        self._leases[lease.lease_id] = lease
        self._table[lease.slot] = lease.lease_id
        heapq.heappush(self._heap, (lease.expires_s, lease.lease_id))
        return lease

    def get(self, lease_id: int) -> Lease:
        """A lease that runs. Raise GrantRefused."""
        lease = self._leases.get(lease_id)
        if lease is None:
            how = self._ended.get(lease_id)
            if how is None:
                raise GrantRefused(Refusal.STALE)
            raise GrantRefused(Refusal.EXPIRED if how is LeaseEnd.EXPIRED else Refusal.RELEASED)
        if lease.expires_s <= self._clock():
            raise GrantRefused(Refusal.EXPIRED)
        return lease

    def extend(self, lease_id: int, lease_s: float) -> Lease:
        """It runs for at least so long from now. Raise GrantRefused."""
        lease = self.get(lease_id)
        wanted = self._clock() + lease_s
        if wanted > lease.expires_s:
            lease.expires_s = wanted
            heapq.heappush(self._heap, (wanted, lease_id))
        return lease

    def end(self, lease_id: int, how: LeaseEnd) -> Lease | None:
        """None when it has ended before."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._table[lease.slot] = 0
        self._free.append(lease.slot)
        self._ended[lease_id] = how
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        if len(self._heap) > 2 * len(self._leases) + 64:
            self._heap = [(each.expires_s, each.lease_id) for each in self._leases.values()]
            heapq.heapify(self._heap)
        return lease

    def expire(self) -> list[Lease]:
        """End those whose time is over."""
        now = self._clock()
        over: list[Lease] = []
        while self._heap and self._heap[0][0] <= now:
            expires_s, lease_id = heapq.heappop(self._heap)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_s == expires_s:
                self.end(lease_id, LeaseEnd.EXPIRED)
                over.append(lease)
        return over

    def next_expiry(self) -> float | None:
        """When to call `expire` next, on the clock; it may be too early, never too late."""
        return self._heap[0][0] if self._heap else None

    def of_region(self, region_id: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if region_id in lease.regions]

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests."""
        taken = {lease.slot: lease.lease_id for lease in self._leases.values()}
        assert len(taken) == len(self._leases), "two leases share a slot"
        assert set(taken).isdisjoint(self._free), "a slot is free and taken"
        assert len(taken) + len(self._free) == len(self._table), "a slot is lost"
        assert all(self._table[slot] == taken.get(slot, 0) for slot in range(len(self._table))), "the table is wrong"
        scheduled = set(self._heap)
        assert all((lease.expires_s, lease.lease_id) in scheduled for lease in self._leases.values()), "never expires"
        assert len(self._heap) <= 2 * len(self._leases) + 65, "the heap grows"
