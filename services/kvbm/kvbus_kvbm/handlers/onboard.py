"""PinBlocks: what is in G2 is pinned at once, what lies below is brought up meanwhile."""

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_wire.kvbm import PinBlocks, PinnedBlocks
from kvbus_wire.packing import unpack_keys


class Onboarding:
    """``changed`` and ``used``: see `handlers.blocks`. No request waits longer than ``max_wait_s``.
    ``spared`` hears how many tokens of which tier an instance need not compute."""

    def __init__(
        self,
        pools: Pools,
        loads: Loads,
        *,
        changed: Callable[[OpenPool], None],
        used: Callable[[OpenPool, bytes], None],
        spared: Callable[[str, str, int], None],
        max_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._loads = loads
        self._changed = changed
        self._used = used
        self._spared = spared
        self._max_wait_s = max_wait_s
        self._clock = clock

    async def pin(self, request: PinBlocks) -> PinnedBlocks:
        pinned = self._pin(request)
        wait_s = min(request.wait_s, self._max_wait_s) if math.isfinite(request.wait_s) else 0.0
        if wait_s <= 0:
            return pinned
        keys = unpack_keys(request.keys)
        if len(pinned.slots) == len(keys):
            return pinned
        run = len(pinned.slots)
        load = self._loads.bring_up(
            self._pools.get(request.pool_id), keys[run:], keys[run - 1] if run else request.parent, request.tiers
        )
        if load is None:
            return pinned
        if not run:
            await self._loads.wait(load, keys[0], wait_s)
            pinned = self._pin(request, again=True)
            run = len(pinned.slots)
        coming = self._loads.coming(load, keys[run:])
        return msgspec.structs.replace(pinned, coming=coming, awaits=load.reading if coming else "")

    def _pin(self, request: PinBlocks, *, again: bool = False) -> PinnedBlocks:
        pool = self._pools.get(request.pool_id)
        try:
            pinned = pool.pool.pin(request.instance_id, request.keys, self._clock(), again=again)
            return msgspec.structs.replace(pinned, brought=self._count(pool, request, len(pinned.slots)))
        finally:
            self._changed(pool)
            self._used(pool, request.keys)

    def _count(self, pool: OpenPool, request: PinBlocks, blocks: int) -> dict[str, int]:
        """What was brought up counts for the tier it came from, once: how many blocks, without those that were in G2."""
        sources: Counter[str] = Counter()
        for key in unpack_keys(request.keys[: blocks * KEY_BYTES]):
            block = pool.pool.find(key)
            if block is not None:
                sources[block.source] += 1
                block.source = "g2"
        for tier, count in sources.items():
            self._spared(request.instance_id, tier, count * pool.spec.block_size)
        return {tier: count for tier, count in sources.items() if tier != "g2"}
