"""RetainBlocks and DropBlocks: what is known of the future of blocks, told to all tiers."""

from collections.abc import Callable

from kvbus_kvbm.adapters.events import TIER
from kvbus_kvbm.adapters.tiers import Tiers
from kvbus_kvbm.core.keeping import directives_of
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks, RetainBlocks, Retained
from kvbus_wire.packing import unpack_keys


class Retention:
    """``changed`` and ``used``: see `handlers.blocks`."""

    def __init__(
        self,
        pools: Pools,
        tiers: Tiers,
        *,
        changed: Callable[[OpenPool], None],
        used: Callable[[OpenPool, bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._tiers = tiers
        self._changed = changed
        self._used = used
        self._clock = clock

    async def retain(self, request: RetainBlocks) -> Retained:
        """Blocks in G2 get their directives at once, and the tiers below hear of it soon; what lies only below is asked for there,
        since the answer says what could not be pinned."""
        pool = self._pools.get(request.pool_id)
        now_s = self._clock()
        try:
            unpinned = set(pool.pool.retain(request.keys, request.directives, now_s).unpinned)
        finally:
            self._changed(pool)
        self._used(pool, request.keys)
        if not self._tiers.edges:
            return Retained(unpinned=tuple(sorted(unpinned)))
        keys = unpack_keys(request.keys)
        here: list[int] = []
        below: list[int] = []
        said = directives_of(request.directives, len(keys), now_s)
        for position, (key, one) in enumerate(zip(keys, said, strict=True)):
            block = pool.pool.find(key)
            if one is None:
                continue
            if block is None:
                below.append(position)
            else:
                here.append(position)
                # Each tier has shares of its own: a pin that G2 could not grant is asked for below.
                said[position] = one if position in unpinned else block.directive
        self._tiers.renew(pool.spec, [keys[i] for i in here], [one for i in here if (one := said[i])])
        below = [i for i in below if self._lies_below(pool.spec, keys[i])]
        if below:
            refused = await self._tiers.retain(
                pool.spec, [keys[i] for i in below], [o for i in below if (o := said[i])]
            )
            unpinned |= {below[i] for i in refused}
        return Retained(unpinned=tuple(sorted(unpinned)))

    async def drop(self, request: DropBlocks) -> DroppedBlocks:
        dropped = {TIER: 0}
        specs: dict[PoolSpec, str] = {}
        for edge in self._tiers.edges:
            specs |= {spec: "" for spec, _ in self._tiers.specs(edge.tier.name) if spec.model == request.model}
        for pool in self._pools.of_model(request.model):
            specs[pool.spec] = pool.pool_id
            try:
                dropped[TIER] += pool.pool.drop_blocks(request.keys, self._clock())
            finally:
                self._changed(pool)
        keys = unpack_keys(request.keys)
        for spec, pool_id in specs.items():
            for tier, blocks in (await self._tiers.drop(spec, pool_id, keys)).items():
                dropped[tier] = dropped.get(tier, 0) + blocks
        return DroppedBlocks(blocks=dropped)

    def _lies_below(self, spec: PoolSpec, key: bytes) -> bool:
        return any(key in self._tiers.index(edge.tier.name, spec) for edge in self._tiers.edges)
