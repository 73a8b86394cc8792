"""What all parts of the tier in the cluster's store share: the index, the log, and what is to be deleted."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from kvbus_blocks.retention import shifted
from kvbus_kvbm.adapters.cluster.ledger import Ledger
from kvbus_kvbm.adapters.cluster.reaching import Reaching
from kvbus_kvbm.adapters.cluster.store import ClusterStore, StoreFailed
from kvbus_kvbm.core.cluster_index import ClusterBlock, ClusterIndex
from kvbus_kvbm.core.cluster_limits import ClusterLimits, Removals
from kvbus_kvbm.core.cluster_log import Kept
from kvbus_kvbm.core.cluster_objects import layout_tag, object_name
from kvbus_kvbm.core.lower import BlockMeta, Changed, TierCounters
from kvbus_kvbm.core.spec import PoolSpec

_DELETE_AT_ONCE = 1000
_TAKE_OVER_AT_ONCE = 256


class ClusterState:
    """Changed on the event loop only."""

    def __init__(
        self,
        store: ClusterStore,
        limits: ClusterLimits,
        counters: TierCounters,
        *,
        owner: str,
        changed: Changed,
        log: Any,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.limits = limits
        self.counters = counters
        self.log = log
        self.clock = clock
        self.unix_s = unix_clock() - clock()
        self.reaching = Reaching(limits, counters, clock, log)
        life = int(unix_clock() * 1000)
        self.ledger = Ledger(
            store,
            self.reaching,
            counters,
            owner=owner,
            life=life,
            unix_s=self.unix_s,
            max_parts=limits.log_parts,
            log=log,
        )
        self.index = ClusterIndex(limits.capacity_bytes, limits.pin_share)
        self._changed = changed
        self._removals = Removals()
        self._doomed: dict[str, ClusterBlock | None] = {}

    @property
    def doomed(self) -> int:
        return len(self._removals)

    def publish(self) -> None:
        for spec, events in self.index.take_events():
            self._changed(spec, events)

    def find_local(self, meta: BlockMeta) -> BlockMeta:
        """A block from the store, with its directive's time by our clock."""
        return BlockMeta(meta.key, meta.parent, meta.depth, meta.checksum, shifted(meta.directive, -self.unix_s))

    def lose(self, block: ClusterBlock, *, delete: bool) -> None:
        """It goes from the index. ``delete``: and from the store, if it is ours; else it is not there any more."""
        self.index.remove(block)
        if delete and block.created:
            self.doom(object_name(layout_tag(block.shelf.spec), block.key), block)
        else:
            self.ledger.note_gone(block.shelf.spec, block.key)

    def doom(self, name: str, block: ClusterBlock | None = None) -> None:
        """Delete it, soon. ``block``: it stays in the log until that is done."""
        self._removals.add([name])
        self._doomed[name] = block

    def spare(self, name: str) -> None:
        """It is written anew."""
        self._removals.discard(name)
        self._doomed.pop(name, None)

    def make_room(self, *, spare_pinned: bool) -> bool:
        evicted, fits = self.index.make_room(self.clock(), spare_pinned=spare_pinned)
        for block in evicted:
            kind = self.index.kind(block)
            self.counters.evictions[kind] = self.counters.evictions.get(kind, 0) + 1
            self.lose(block, delete=True)
        return fits

    async def delete_doomed(self) -> None:
        """Raise StoreFailed; what was not deleted is tried again, not for ever."""
        while self._removals:
            names = self._removals.due(_DELETE_AT_ONCE)
            try:
                await self.reaching.call("delete", partial(self.store.delete, names))
            except StoreFailed:
                given_up = self._removals.failed(names)
                if given_up:
                    self.log.warning("g4_not_deleted", objects=len(given_up), first=given_up[0])
                self._forget(given_up)
                raise
            self._removals.done(names)
            self._forget(names)

    def _forget(self, names: list[str]) -> None:
        for name in names:
            block = self._doomed.pop(name, None)
            if block is not None and self.index.find(block.shelf.spec, block.key) is None:
                self.ledger.note_gone(block.shelf.spec, block.key)

    async def rewrite_log(self) -> None:
        blocks = [block for shelf in self.index for block in shelf.blocks.values()]
        blocks += [block for block in self._doomed.values() if block is not None]
        await self.ledger.rewrite(blocks)

    async def take_over(self, recovered: list[tuple[PoolSpec, Kept]]) -> None:
        """Blocks of an earlier life; parents before children. In pieces: a store may be back while others are served."""
        for start in range(0, len(recovered), _TAKE_OVER_AT_ONCE):
            self._take_over(recovered[start : start + _TAKE_OVER_AT_ONCE])
            self.publish()
            await asyncio.sleep(0)
        self.make_room(spare_pinned=False)

    def _take_over(self, recovered: list[tuple[PoolSpec, Kept]]) -> None:
        now_s = self.clock()
        landed = []
        for spec, kept in recovered:
            known = self.index.find(spec, kept.key)
            if known is not None:
                known.created = known.created or kept.created
                continue
            directive = shifted(kept.directive, -self.unix_s)
            meta = BlockMeta(kept.key, kept.parent, kept.depth, kept.checksum, directive)
            landed.append(self.index.insert(spec, meta, now_s, created=kept.created))
        self.index.landed(landed)
