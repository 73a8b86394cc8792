"""What `kvbus kv` asks: what lies in which tier, whether it is whole, and moving it by hand."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvbus_blocks.keys import KEY_BYTES, ROOT
from kvbus_blocks.retention import KINDS, effective
from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.adapters.cluster.waiting import in_thread
from kvbus_kvbm.adapters.events import TIER
from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.adapters.tiers import Edge, Tiers, meta_of
from kvbus_kvbm.core.block import Block, State
from kvbus_kvbm.core.errors import InvalidRequest, TooManyKeys
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_transfer import checksum
from kvbus_wire.kv_tools import (
    BlockState,
    DescribedTiers,
    DescribeTiers,
    EvictBlocks,
    InspectBlocks,
    ListBlocks,
    ListedBlocks,
    TierHolding,
    TierState,
    VerifiedBlocks,
    VerifyBlocks,
    WarmBlocks,
    WarmedBlocks,
)
from kvbus_wire.kvbm import DroppedBlocks
from kvbus_wire.message import Message
from kvbus_wire.packing import pack_keys, unpack_keys

KvRequest = DescribeTiers | ListBlocks | InspectBlocks | VerifyBlocks | EvictBlocks | WarmBlocks
REQUESTS: tuple[type[Message], ...] = (
    DescribeTiers,
    ListBlocks,
    InspectBlocks,
    VerifyBlocks,
    EvictBlocks,
    WarmBlocks,
)


_LISTING_S = 60.0
_AT_ONCE = 2000
"""Blocks looked at before others get their turn: a tier may have hundreds of thousands."""

_Entry = tuple[bytes, PoolSpec]


class _Listing(NamedTuple):
    """What pages are cut from, in the order of keys."""

    model: str
    tier: str
    entries: list[_Entry]


class KvRequests:
    """``max_blocks``: in one answer; ``verify_bytes``: read for one; ``max_wait_s``: for blocks that come up. ``changed``: see
    `handlers.blocks`."""

    def __init__(
        self,
        instance_id: str,
        host_id: str,
        g4_store: str,
        pools: Pools,
        arenas: Arenas,
        tiers: Tiers,
        loads: Loads,
        *,
        max_keys: int,
        max_blocks: int,
        verify_bytes: int,
        max_wait_s: float,
        changed: Callable[[OpenPool], None],
        clock: Callable[[], float],
    ) -> None:
        self._instance_id = instance_id
        self._host_id = host_id
        self._g4_store = g4_store
        self._pools = pools
        self._arenas = arenas
        self._tiers = tiers
        self._loads = loads
        self._max_keys = max_keys
        self._max_blocks = max_blocks
        self._verify_bytes = verify_bytes
        self._max_wait_s = max_wait_s
        self._changed = changed
        self._clock = clock
        # One piece at a time: scrubbing must not take the tiers from those who serve requests.
        self._scrubbing = asyncio.Lock()
        self._listing: _Listing | None = None
        self._listing_ends: asyncio.TimerHandle | None = None

    async def handle(self, request: KvRequest) -> Message:
        """Raise KvbmError."""
        match request:
            case DescribeTiers():
                return await self._describe()
            case ListBlocks():
                metas, after = self._page(request.model, request.tier, request.after, request.limit)
                return ListedBlocks(tuple(self._state(request.tier, meta, spec) for spec, meta in metas), after)
            case InspectBlocks():
                return self._inspect(request)
            case VerifyBlocks():
                async with self._scrubbing:
                    return await self._verify(request)
            case EvictBlocks():
                return await self._evict(request)
            case WarmBlocks():
                return await self._warm(request)

    async def _describe(self) -> DescribedTiers:
        tiers = [self._describe_g2(), *[await self._describe_lower(edge) for edge in self._tiers.edges]]
        return DescribedTiers(
            instance_id=self._instance_id, host_id=self._host_id, tiers=tuple(tiers), g4_store=self._g4_store
        )

    def _describe_g2(self) -> TierState:
        pools = list(self._pools)
        counters = [pool.pool.counters for pool in pools]
        evictions: dict[str, int] = {kind: sum(getattr(each, f"evicted_{kind}") for each in counters) for kind in KINDS}
        return TierState(
            tier=TIER,
            blocks=sum(pool.pool.usage().present for pool in pools),
            used_bytes=sum(pool.pool.usage().present * pool.spec.slot_bytes for pool in pools),
            capacity_bytes=self._pools.budget.g2_bytes,
            hits=sum(each.hits for each in counters),
            misses=sum(each.misses for each in counters),
            stored=sum(each.stored for each in counters),
            refused=sum(each.refused for each in counters),
            corrupt=sum(each.corrupt for each in counters),
            evictions={kind: count for kind, count in evictions.items() if count},
            holdings=tuple(
                _holding(pool.spec, pool.pool.usage().present, pool.pool.usage().retained) for pool in pools
            ),
        )

    async def _describe_lower(self, edge: Edge) -> TierState:
        held = {spec: list(index) for spec, index in self._tiers.specs(edge.tier.name) if len(index)}
        holdings = [_holding(spec, len(keys), await self._pinned(edge, spec, keys)) for spec, keys in held.items()]
        usage, counters = edge.tier.usage(), edge.tier.counters
        return TierState(
            tier=edge.tier.name,
            blocks=usage.blocks,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            available=usage.available,
            hits=counters.hits,
            misses=counters.misses,
            stored=counters.stored,
            refused=counters.refused,
            corrupt=counters.corrupt,
            failures=counters.failures,
            evictions=dict(counters.evictions),
            holdings=tuple(holdings),
        )

    async def _pinned(self, edge: Edge, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        count = 0
        for start in range(0, len(keys), _AT_ONCE):
            now_s = self._clock()
            found = [edge.tier.find(spec, key) for key in keys[start : start + _AT_ONCE]]
            count += sum(meta is not None and effective(meta.directive, now_s).kind == "pinned" for meta in found)
            await asyncio.sleep(0)
        return count

    def _inspect(self, request: InspectBlocks) -> ListedBlocks:
        keys = self._keys(request.keys, self._max_blocks)
        states: list[BlockState] = []
        for tier in (TIER, *(edge.tier.name for edge in self._tiers.edges)):
            specs = self._specs(request.model, tier)
            for key in keys:
                # Of several layouts that have it the last one.
                found = [(spec, meta) for spec in specs if (meta := self._find(tier, spec, key)) is not None]
                states += [self._state(tier, meta, spec) for spec, meta in found[-1:]]
        return ListedBlocks(tuple(states))

    async def _verify(self, request: VerifyBlocks) -> VerifiedBlocks:
        largest = max((spec.block_bytes for spec in self._specs(request.model, request.tier)), default=1)
        limit = max(1, min(request.limit, self._verify_bytes // largest))
        metas, after = self._page(request.model, request.tier, request.after, limit)
        bad: list[bytes] = []
        for spec in dict.fromkeys(spec for spec, _ in metas):
            keys = [meta.key for of, meta in metas if of == spec]
            if request.tier == TIER:
                bad += await self._verify_g2(spec, keys)
            else:
                bad += await self._edge(request.tier).tier.verify(spec, keys)
        return VerifiedBlocks(checked=len(metas), bad=pack_keys(bad), after=after)

    async def _verify_g2(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        """Held meanwhile, so that what is read is not written anew; a use that this is not."""
        pool = self._pools.find(spec)
        if pool is None:
            return []
        held = pool.pool.moves.hold(keys)
        views = [self._arenas.view(pool.pool_id, block.slot, spec.block_bytes) for block in held]
        try:
            sums = await in_thread(lambda: [checksum(view) for view in views])
        finally:
            views.clear()
            pool.pool.moves.let_go(held)
        bad = [block for block, found in zip(held, sums, strict=True) if found != block.checksum and not block.detached]
        for block in bad:
            self._drop_corrupt(pool, block)
        self._changed(pool)
        return [block.key for block in bad]

    def _drop_corrupt(self, pool: OpenPool, block: Block) -> None:
        now_s = self._clock()
        lease = pool.pool.pin(self._instance_id, block.key, now_s)
        if lease.lease_id:
            pool.pool.release(lease.lease_id, [0], now_s)

    async def _evict(self, request: EvictBlocks) -> DroppedBlocks:
        keys = self._keys(request.keys, self._max_keys)
        if not keys:
            raise InvalidRequest("no keys")
        freed = 0
        if request.tier == TIER:
            for pool in self._pools.of_model(request.model):
                freed += pool.pool.drop_blocks(request.keys, self._clock())
                self._changed(pool)
        else:
            for spec in self._specs(request.model, request.tier):
                freed += await self._edge(request.tier).tier.drop(spec, keys)
        return DroppedBlocks(blocks={request.tier: freed})

    async def _warm(self, request: WarmBlocks) -> WarmedBlocks:
        keys = self._keys(request.keys, self._max_keys)
        pools = self._pools.of_model(request.model)
        if not keys:
            raise InvalidRequest("no keys")
        wait_s = min(request.wait_s, self._max_wait_s) if math.isfinite(request.wait_s) else 0.0
        ends_s = self._clock() + wait_s
        best = WarmedBlocks(present=0)  # where no worker of the model is
        for pool in pools:
            present = pool.pool.moves.leading(keys)
            load = self._loads.bring_up(pool, keys[present:], keys[present - 1] if present else ROOT)
            coming = 0
            if load is not None:
                await self._loads.wait(load, keys[-1], max(0.0, ends_s - self._clock()))
                present = pool.pool.moves.leading(keys)
                coming = self._loads.coming(load, keys[present:])
            if present + coming >= best.present + best.coming:
                best = WarmedBlocks(present=present, coming=coming)
        return best

    def _page(self, model: str, tier: str, after: bytes, limit: int) -> tuple[list[tuple[PoolSpec, BlockMeta]], bytes]:
        """The next blocks in the order of their keys, of what was there at the first page: to look at everything for each page
        would cost whoever scrubs a large tier hours."""
        limit = min(limit, self._max_blocks)
        if limit < 1:
            raise InvalidRequest("limit must be at least 1")
        listing = self._listing
        is_same = listing is not None and (listing.model, listing.tier) == (model, tier)
        if listing is None or not after or not is_same:
            entries = [(key, spec) for spec in self._specs(model, tier) for key in self._keys_in(tier, spec)]
            self._forget_listing()
            self._listing = listing = _Listing(model, tier, sorted(entries, key=_key_of))
            self._listing_ends = asyncio.get_running_loop().call_later(_LISTING_S, self._forget_listing)
        page, after = page_of(listing.entries, after, limit)
        if not after:
            self._forget_listing()
        return [(spec, meta) for key, spec in page if (meta := self._find(tier, spec, key)) is not None], after

    def _forget_listing(self) -> None:
        """It holds as much as the tier has blocks, and nobody may ask for the rest of it."""
        if self._listing_ends is not None:
            self._listing_ends.cancel()
        self._listing = self._listing_ends = None

    def _specs(self, model: str, tier: str) -> list[PoolSpec]:
        """Raise InvalidRequest for a tier that there is not."""
        if tier == TIER:
            return [pool.spec for pool in self._pools.of_model(model)]
        self._edge(tier)
        return [spec for spec, _ in self._tiers.specs(tier) if spec.model == model]

    def _keys_in(self, tier: str, spec: PoolSpec) -> Iterable[bytes]:
        if tier != TIER:
            return self._tiers.index(tier, spec)
        pool = self._pools.find(spec)
        return () if pool is None else pool.pool.keys()

    def _find(self, tier: str, spec: PoolSpec, key: bytes) -> BlockMeta | None:
        if tier != TIER:
            return self._edge(tier).tier.find(spec, key)
        pool = self._pools.find(spec)
        block = None if pool is None else pool.pool.find(key)
        return meta_of(block) if block is not None and block.state is State.PRESENT else None

    def _edge(self, tier: str) -> Edge:
        for edge in self._tiers.edges:
            if edge.tier.name == tier:
                return edge
        raise InvalidRequest(f"there is no tier {tier!r} here")

    def _keys(self, packed: bytes, limit: int) -> list[bytes]:
        if len(packed) % KEY_BYTES:
            raise InvalidRequest(f"{len(packed)} bytes are no keys of {KEY_BYTES} bytes")
        if len(packed) > limit * KEY_BYTES:
            raise TooManyKeys(f"{len(packed) // KEY_BYTES} keys, at most {limit}", limit=limit)
        return list(dict.fromkeys(unpack_keys(packed)))

    def _state(self, tier: str, meta: BlockMeta, spec: PoolSpec) -> BlockState:
        now_s = self._clock()
        said = effective(meta.directive, now_s)
        pool = self._pools.find(spec) if tier == TIER else None
        block = None if pool is None else pool.pool.find(meta.key)
        return BlockState(
            tier=tier,
            key=meta.key,
            parent=meta.parent,
            depth=meta.depth,
            kind=said.kind,
            priority=said.priority,
            ttl_s=None if said.expires_s is None else said.expires_s - now_s,
            tenant=said.tenant,
            users=0 if block is None else block.pins,
        )


def page_of(entries: Sequence[_Entry], after: bytes, limit: int) -> tuple[Sequence[_Entry], bytes]:
    """The next ``limit`` of those in the order of their keys, and where the page after it begins (empty: there is none). Equal
    keys, which different layouts have, come together, if need be beyond the limit."""
    start = bisect_right(entries, after, key=_key_of)
    end = start + limit
    if end < len(entries):
        end = bisect_right(entries, _key_of(entries[end - 1]), key=_key_of)
    return entries[start:end], _key_of(entries[end - 1]) if end < len(entries) else b""


def _key_of(entry: _Entry) -> bytes:
    return entry[0]


def _holding(spec: PoolSpec, blocks: int, pinned: int) -> TierHolding:
    return TierHolding(spec.model, spec.kv_layout, spec.block_bytes, spec.block_size, blocks, pinned)
