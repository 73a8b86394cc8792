"""What an agent owns: its regions, the leases on them, and the checks of a grant that comes back."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbus_transfer.counters import TransferCounters
from kvbus_transfer.errors import GrantRefused, LimitReached, Refusal
from kvbus_transfer.grants import AgentInfo, GrantBody, Sealer, body_of, pick
from kvbus_transfer.leases import Lease, LeaseBook, LeaseEnd, LeaseTable
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.regions import Region, region_of


class Granted(msgspec.Struct, frozen=True):
    """``sealed`` goes to the peer, over the bus; ``lease_id`` stays here, for `release`."""

    sealed: bytes
    lease_id: int


class Ownership:
    """``info`` must be set before the first grant."""

    def __init__(
        self,
        sealer: Sealer,
        table: LeaseTable,
        limits: TransferLimits,
        counters: TransferCounters,
        *,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        self.leases = LeaseBook(table, clock)
        self._info: AgentInfo | None = None
        self._sealer = sealer
        self._limits = limits
        self.counters = counters
        self._clock = clock
        self._wall_ms = wall_ms
        self._regions: dict[int, Region] = {}
        self._last_region = 0

    @property
    def info(self) -> AgentInfo:
        if self._info is None:
            raise RuntimeError("the agent was not started")
        return self._info

    @info.setter
    def info(self, info: AgentInfo) -> None:
        self._info = info

    def register(self, memory: Any, layout: str) -> Region:
        self._last_region += 1
        region = region_of(self._last_region, memory, layout)
        self._regions[region.region_id] = region
        return region

    def deregister(self, region: Region) -> list[Lease]:
        """Ends the leases on it, too; returns them."""
        self._regions.pop(region.region_id, None)
        ended = [self.leases.end(each.lease_id, LeaseEnd.RELEASED) for each in self.leases.of_region(region.region_id)]
        return [lease for lease in ended if lease is not None]

    def regions(self) -> list[Region]:
        return list(self._regions.values())

    def grant(
        self,
        region: Region,
        segments: Sequence[tuple[int, int]],
        *,
        lease_s: float,
        peer: str,
        access: str,
        lease_id: int | None,
        backends: dict[str, bytes],
    ) -> Granted:
        if self._regions.get(region.region_id) is not region:
            raise ValueError("the region is not registered")
        if not 0 < lease_s <= self._limits.lease_s:
            raise ValueError(f"a lease of {lease_s} s; at most {self._limits.lease_s}")
        if len(segments) > self._limits.grant_blocks:
            raise LimitReached(f"{len(segments)} blocks in a grant, at most {self._limits.grant_blocks}", own=True)
        for offset, length in segments:
            if offset < 0 or length < 1 or offset + length > region.size_bytes:
                raise ValueError(f"[{offset}, {offset + length}) is not in a region of {region.size_bytes} bytes")
        if lease_id is None:
            lease = self.leases.add(lease_s, peer)
        else:
            lease = self.leases.extend(lease_id, lease_s)
            if lease.peer != peer:
                raise ValueError("the lease is for another peer")
        lease.regions.add(region.region_id)
        body = GrantBody(
            owner=msgspec.structs.replace(self.info, backends=backends),
            lease_id=lease.lease_id,
            region_id=region.region_id,
            segments=[(offset, length) for offset, length in segments],
            expires_ms=self._wall_ms() + int((lease.expires_s - self._clock()) * 1000),
            slot=lease.slot,
            peer=peer,
            access=access,
            layout=region.layout,
        )
        return Granted(self._sealer.seal(body), lease.lease_id)

    def check(self, grant: bytes, peer: str, *, access: str | None = None) -> tuple[GrantBody, Region]:
        """A grant that a peer shows. Raise GrantRefused."""
        try:
            return self._check(grant, peer, access)
        except GrantRefused as refused:
            self.counters.refused[refused.reason] += 1
            raise

    def segments(self, body: GrantBody, region: Region, indices: list[int]) -> list[tuple[int, int]]:
        """Raise GrantRefused."""
        try:
            found = pick(body, indices)
            if any(offset + length > region.size_bytes for offset, length in found):
                raise GrantRefused(Refusal.OUT_OF_RANGE)
        except GrantRefused as refused:
            self.counters.refused[refused.reason] += 1
            raise
        return found

    def _check(self, grant: bytes, peer: str, access: str | None) -> tuple[GrantBody, Region]:
        body = body_of(grant)
        if body.owner.agent_id != self.info.agent_id:
            raise GrantRefused(Refusal.FORGED, "it is of another agent")
        if body.owner.incarnation != self.info.incarnation:
            raise GrantRefused(Refusal.STALE, "the owner has been started anew since")
        if not self._sealer.is_sealed(grant):
            raise GrantRefused(Refusal.FORGED)
        if body.peer and body.peer != peer:
            raise GrantRefused(Refusal.WRONG_PEER, f"it is for {body.peer}, not for {peer}")
        if access is not None and body.access != access:
            raise GrantRefused(Refusal.WRONG_ACCESS, f"it is to {body.access}")
        region = self._regions.get(body.region_id)
        self.leases.get(body.lease_id)
        if region is None:
            raise GrantRefused(Refusal.STALE, "the region is gone")
        return body, region
