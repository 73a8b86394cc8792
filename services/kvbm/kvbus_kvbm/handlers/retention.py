"""RetainBlocks and DropBlocks: what is known of the future of blocks, told to all tiers."""

from collections.abc import Callable, Sequence

from kvbus_blocks.keys import KEY_BYTES
from kvbus_kvbm.adapters.events import TIER
from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.adapters.tiers import Tiers
from kvbus_kvbm.core.errors import InvalidRequest
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
        loads: Loads,
        *,
        changed: Callable[[OpenPool], None],
        used: Callable[[OpenPool, bytes], None],
        max_keys: int,
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._tiers = tiers
        self._loads = loads
        self._max_keys = max_keys
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
        """In pieces that a pool takes. A block goes only after those below it, and these may be in any piece."""
        if len(request.keys) % KEY_BYTES:
            raise InvalidRequest(f"{len(request.keys)} bytes are no keys of {KEY_BYTES} bytes")
        dropped = {TIER: 0, **{edge.tier.name: 0 for edge in self._tiers.edges}}
        keys = list(dict.fromkeys(unpack_keys(request.keys)))
        pieces = [keys[at : at + self._max_keys] for at in range(0, len(keys), self._max_keys)]
        for piece in (*pieces, *pieces[-2::-1]):
            for spec in self._specs(request.model):
                for tier, blocks in (await self._drop(spec, piece)).items():
                    dropped[tier] += blocks
        return DroppedBlocks(blocks=dropped)

    async def _drop(self, spec: PoolSpec, keys: Sequence[bytes]) -> dict[str, int]:
        pool = self._pools.find(spec)
        freed = 0
        if pool is not None:
            await self._loads.stop(pool.pool_id, keys)
            try:
                freed = pool.pool.drop_blocks(b"".join(keys), self._clock())
            finally:
                self._changed(pool)
        return {TIER: freed, **await self._tiers.drop(spec, "" if pool is None else pool.pool_id, keys)}

    def _specs(self, model: str) -> list[PoolSpec]:
        """Everything of the model that there are blocks of, also where its pool is gone."""
        specs = {pool.spec: None for pool in self._pools.of_model(model)}
        for edge in self._tiers.edges:
            specs |= {spec: None for spec, _ in self._tiers.specs(edge.tier.name) if spec.model == model}
        return list(specs)

    def _lies_below(self, spec: PoolSpec, key: bytes) -> bool:
        return any(key in self._tiers.index(edge.tier.name, spec) for edge in self._tiers.edges)
