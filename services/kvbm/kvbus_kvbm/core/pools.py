"""Which pools there are, and how the memory budget is divided among them."""

from collections.abc import Callable, Container, Iterator

import msgspec

from kvbus_kvbm.core.errors import InvalidRequest, NoRoomForPool, PoolGone, Unsupported
from kvbus_kvbm.core.leases import pool_of
from kvbus_kvbm.core.pool import Pool, PoolLimits
from kvbus_kvbm.core.spec import PoolSpec

__all__ = ["Attachment", "Budget", "OpenPool", "Plan", "PoolSpec", "Pools"]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """``pool_share``: what a new pool takes of the bytes that no pool has yet. ``min_slots``: a smaller pool is not worth it.

    ``max_models`` counts all models since the start: the numbering of a model's events outlives its pools.
    """

    g2_bytes: int
    pool_share: float
    max_pools: int
    max_models: int
    min_slots: int


class Plan(msgspec.Struct, frozen=True):
    """A pool to be made. ``reclaim``: pools to be removed before, because nobody uses them."""

    pool_id: str
    spec: PoolSpec
    slots: int
    reclaim: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.slots * self.spec.slot_bytes


class Attachment(msgspec.Struct, frozen=True):
    incarnation: int
    at_s: float


class OpenPool:
    """A pool, and which workers have attached it."""

    def __init__(self, plan: Plan, pool: Pool, path: str) -> None:
        self.pool_id = plan.pool_id
        self.spec = plan.spec
        self.size_bytes = plan.size_bytes
        self.pool = pool
        self.path = path
        self.attached: dict[str, Attachment] = {}


class Pools:
    """All pools of this kvbm. ``new_id`` gives ids that no other kvbm, nor this one before, has used."""

    def __init__(self, budget: Budget, limits: PoolLimits, new_id: Callable[[], str]) -> None:
        self.budget = budget
        self._limits = limits
        self._new_id = new_id
        self._pools: dict[str, OpenPool] = {}
        # Insertion-ordered set of every model that ever had a pool.
        self._models: dict[str, None] = {}

    def __iter__(self) -> Iterator[OpenPool]:
        return iter(tuple(self._pools.values()))

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def assigned_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self)

    def find(self, spec: PoolSpec) -> OpenPool | None:
        return next((pool for pool in self if pool.spec == spec), None)

    def plan(self, spec: PoolSpec) -> Plan:
        """How a pool for ``spec`` would be made. Pools without an attached worker give way, oldest first.

        Raise NoRoomForPool, Unsupported, InvalidRequest.
        """
        if spec.block_bytes < 1 or spec.block_size < 1:
            raise InvalidRequest(f"a block of {spec.block_bytes} bytes and {spec.block_size} tokens")
        if spec.model not in self._models and len(self._models) >= self.budget.max_models:
            raise NoRoomForPool(f"{len(self._models)} models had pools here", max_models=self.budget.max_models)
        # One event stream per model, and a stream has one block size: pools with another one are in the way.
        reclaim: list[str] = []
        for pool in self.of_model(spec.model):
            if pool.spec.block_size == spec.block_size:
                continue
            if pool.attached:
                message = f"{spec.model} has blocks of {pool.spec.block_size} tokens here, not of {spec.block_size}"
                raise Unsupported(message, block_size=pool.spec.block_size)
            reclaim.append(pool.pool_id)
        idle = [pool.pool_id for pool in self if not pool.attached and pool.pool_id not in reclaim]
        while True:
            slots = self._slots(spec, without=reclaim)
            if slots:
                return Plan(self._new_id(), spec, slots, tuple(reclaim))
            if not idle:
                break
            reclaim.append(idle.pop(0))
        raise NoRoomForPool(
            f"no room for a pool of {spec.model}",
            g2_bytes=self.budget.g2_bytes,
            assigned_bytes=self.assigned_bytes,
            slot_bytes=spec.slot_bytes,
            pools=len(self),
        )

    def add(self, plan: Plan, path: str) -> OpenPool:
        """Open the pool that was planned; its memory is there."""
        pool = OpenPool(plan, Pool(plan.pool_id, plan.slots, self._limits), path)
        self._pools[plan.pool_id] = pool
        self._models[plan.spec.model] = None
        return pool

    def remove(self, pool_id: str) -> OpenPool:
        return self._pools.pop(pool_id)

    def get(self, pool_id: str) -> OpenPool:
        """Raise PoolGone."""
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolGone(f"there is no pool {pool_id}")
        return pool

    def lookup(self, pool_id: str) -> OpenPool | None:
        return self._pools.get(pool_id)

    def of_lease(self, lease_id: str) -> OpenPool | None:
        return self._pools.get(pool_of(lease_id))

    def of_model(self, model: str) -> list[OpenPool]:
        return [pool for pool in self if pool.spec.model == model]

    def models(self) -> list[str]:
        """Every model that has or had a pool."""
        return list(self._models)

    def attach(self, pool: OpenPool, instance_id: str, incarnation: int, now_s: float) -> None:
        """Note a user of the pool. A worker that was started anew loses the leases of its former life, in all pools."""
        former = [p.attached[instance_id].incarnation for p in self if instance_id in p.attached]
        if any(other != incarnation for other in former):
            self.detach(instance_id, now_s)
        pool.attached[instance_id] = Attachment(incarnation, now_s)

    def detach(self, instance_id: str, now_s: float) -> int:
        """A worker is gone: end its leases. Return how many there were."""
        ended = 0
        for pool in self:
            pool.attached.pop(instance_id, None)
            ended += pool.pool.drop_instance(instance_id, now_s)
        return ended

    def detach_absent(self, live: Container[str], now_s: float, grace_s: float) -> None:
        """Detach workers that are not among ``live`` although they attached longer than ``grace_s`` ago."""
        for pool in self:
            for instance_id, attachment in tuple(pool.attached.items()):
                if instance_id not in live and attachment.at_s + grace_s <= now_s:
                    self.detach(instance_id, now_s)

    def expire(self, now_s: float) -> None:
        for pool in self:
            pool.pool.expire(now_s)

    def next_due_s(self) -> float | None:
        due = [pool.pool.next_due_s() for pool in self]
        return min((time_s for time_s in due if time_s is not None), default=None)

    def leases(self) -> int:
        return sum(pool.pool.usage().leases for pool in self)

    def _slots(self, spec: PoolSpec, without: list[str]) -> int:
        """Slots of a new pool when the pools ``without`` are gone; 0 when that is too few."""
        kept = [pool for pool in self if pool.pool_id not in without]
        if len(kept) >= self.budget.max_pools:
            return 0
        open_bytes = self.budget.g2_bytes - sum(pool.size_bytes for pool in kept)
        slots = int(open_bytes * self.budget.pool_share) // spec.slot_bytes
        if slots < self.budget.min_slots:
            slots = open_bytes // spec.slot_bytes  # the last pool may take all that is left
        return slots if slots >= self.budget.min_slots else 0
