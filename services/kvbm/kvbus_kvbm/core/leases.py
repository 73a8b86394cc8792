"""Leases: who may write or read which blocks, until when."""

# ruff: noqa: S101 (check_integrity asserts)

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvbus_kvbm.core.block import Block
from kvbus_kvbm.core.errors import LeaseGone, TooManyLeases

# Commits that came twice because the first answer was lost are recognised among this many.
_REMEMBERED_COMMITS = 1024


class Lease:
    """``blocks[i]`` belongs to key i of the request, None where nothing was handed out. A write lease reserves, others pin."""

    __slots__ = ("blocks", "deadline_s", "instance_id", "is_write", "lease_id")

    def __init__(
        self, lease_id: str, instance_id: str, deadline_s: float, is_write: bool, blocks: Sequence[Block | None]
    ) -> None:
        self.lease_id = lease_id
        self.instance_id = instance_id
        self.deadline_s = deadline_s
        self.is_write = is_write
        self.blocks = tuple(blocks)

    def held(self) -> list[Block]:
        return [block for block in self.blocks if block is not None]


def pool_of(lease_id: str) -> str:
    """The id of the pool that granted a lease."""
    return lease_id.partition(".")[0]


class LeaseTable:
    """The living leases of a pool. Ids begin with the pool's: no lease of an earlier pool is ever taken for one of this."""

    def __init__(self, pool_id: str, lease_s: float, max_per_instance: int) -> None:
        self.lease_s = lease_s
        self._pool_id = pool_id
        self._max_per_instance = max_per_instance
        self._leases: dict[str, Lease] = {}
        self._by_instance: dict[str, set[str]] = {}
        # All leases last equally long, so this is in the order of the deadlines; entries of ended leases are skipped.
        self._order: OrderedDict[str, float] = OrderedDict()
        self._committed: OrderedDict[str, None] = OrderedDict()
        self._granted = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def check_room(self, instance_id: str) -> None:
        """Raise TooManyLeases when the instance may have no further one."""
        held = len(self._by_instance.get(instance_id, ()))
        if held >= self._max_per_instance:
            raise TooManyLeases(f"{instance_id} holds {held} leases", limit=self._max_per_instance)

    def grant(self, instance_id: str, now_s: float, *, is_write: bool, blocks: Sequence[Block | None]) -> Lease:
        self._granted += 1
        lease = Lease(f"{self._pool_id}.{self._granted}", instance_id, now_s + self.lease_s, is_write, blocks)
        self._leases[lease.lease_id] = lease
        self._by_instance.setdefault(instance_id, set()).add(lease.lease_id)
        self._order[lease.lease_id] = lease.deadline_s
        return lease

    def get(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def writing(self, lease_id: str) -> Lease | None:
        """The write lease, or None when it was committed before. Raise LeaseGone."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.is_write:
            return lease
        if lease_id in self._committed:
            return None
        raise LeaseGone(f"lease {lease_id} has ended or never was")

    def end(self, lease: Lease, *, committed: bool = False) -> None:
        del self._leases[lease.lease_id]
        del self._order[lease.lease_id]
        ids = self._by_instance[lease.instance_id]
        ids.discard(lease.lease_id)
        if not ids:
            del self._by_instance[lease.instance_id]
        if committed:
            self._committed[lease.lease_id] = None
            if len(self._committed) > _REMEMBERED_COMMITS:
                self._committed.popitem(last=False)

    def of_instance(self, instance_id: str) -> list[Lease]:
        return [self._leases[lease_id] for lease_id in sorted(self._by_instance.get(instance_id, ()))]

    def expired(self, now_s: float) -> list[Lease]:
        expired: list[Lease] = []
        for lease_id, deadline_s in self._order.items():
            if deadline_s > now_s:
                break
            expired.append(self._leases[lease_id])
        return expired

    def next_deadline_s(self) -> float | None:
        return next(iter(self._order.values()), None)

    def check_integrity(self) -> None:
        assert set(self._order) == set(self._leases)
        assert sorted(self._order.values()) == list(self._order.values())
        by_instance: dict[str, set[str]] = {}
        for lease in self._leases.values():
            by_instance.setdefault(lease.instance_id, set()).add(lease.lease_id)
        assert by_instance == self._by_instance
