"""PinBlocks: what is in G2 is pinned at once, what lies below is brought up meanwhile."""

import math
from collections.abc import Callable

import msgspec

from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_wire.kvbm import PinBlocks, PinnedBlocks
from kvbus_wire.packing import unpack_keys


class Onboarding:
    """``changed`` and ``used``: see `handlers.blocks`. No request waits longer than ``max_wait_s``."""

    def __init__(
        self,
        pools: Pools,
        loads: Loads,
        *,
        changed: Callable[[OpenPool], None],
        used: Callable[[OpenPool, bytes], None],
        max_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._loads = loads
        self._changed = changed
        self._used = used
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
            self._pools.get(request.pool_id), keys[run:], keys[run - 1] if run else request.parent
        )
        if load is None:
            return pinned
        if not run:
            await self._loads.wait(load, keys[0], wait_s)
            pinned = self._pin(request)
            run = len(pinned.slots)
        return msgspec.structs.replace(pinned, coming=self._loads.coming(load, keys[run:]))

    def _pin(self, request: PinBlocks) -> PinnedBlocks:
        pool = self._pools.get(request.pool_id)
        try:
            return pool.pool.pin(request.instance_id, request.keys, self._clock())
        finally:
            self._changed(pool)
            self._used(pool, request.keys)
