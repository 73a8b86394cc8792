"""The tiers below G2: new blocks are written down in the background, and what they say of themselves goes to the indexers.

Nothing here delays a request. While a batch is written its blocks are held in G2, so a batch is a small part of a pool; whatever
a tier does, it costs at most that.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.core.block import Block, State
from kvbus_kvbm.core.lower import BlockMeta, Changed, LowerTier
from kvbus_kvbm.core.pools import OpenPool, Pools, PoolSpec
from kvbus_kvbm.core.relay import relays, storable
from kvbus_kvbm.core.tier_index import TierIndex
from kvbus_kvbm.core.write_through import EdgePolicy, Pacer, TierLimits, WriteQueue
from kvbus_transfer import host_memory
from kvbus_wire.kv_events import KvEvent, Stored
from kvbus_wire.packing import unpack_keys

Spawn = Callable[..., asyncio.Task[Any]]


class EdgeCounters(msgspec.Struct):
    """Blocks that went down, and those that did not: ``refused`` by the tier, ``missed``: gone from G2 before their turn."""

    written: int = 0
    refused: int = 0
    missed: int = 0
    failures: int = 0
    renewals_dropped: int = 0
    write_s: float = 0.0
    written_bytes: int = 0


class Edge:
    """The way down to one tier."""

    def __init__(self, tier: LowerTier, policy: EdgePolicy, bytes_per_s: float, queue_blocks: int) -> None:
        self.tier = tier
        self.policy = policy
        self.pacer = Pacer(bytes_per_s)
        self.queue = WriteQueue(queue_blocks)
        self.counters = EdgeCounters()
        self.wake = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.stuck = False
        # Directives that have changed and the tier does not know yet.
        self.renewals: dict[PoolSpec, dict[bytes, Directive]] = {}
        self.renew = asyncio.Event()
        # Keys of the batch that is being written, those of them that were dropped meanwhile, and whose memory is read for it.
        self.writing: set[bytes] = set()
        self.doomed: set[bytes] = set()
        self.writing_pool: OpenPool | None = None

    def push(self, pool_id: str, keys: Sequence[bytes]) -> None:
        self.queue.push(pool_id, keys)
        if len(self.queue):
            self.quiet.clear()
            self.wake.set()


class Tiers:
    """``changed`` is called with a pool whose state a move has changed; ``publish`` sends events of a tier."""

    def __init__(
        self,
        pools: Pools,
        arenas: Arenas,
        limits: TierLimits,
        *,
        changed: Callable[[OpenPool], None],
        publish: Callable[[PoolSpec, str, Sequence[KvEvent]], None],
        clock: Callable[[], float],
        spawn: Spawn,
        log: Any,
    ) -> None:
        self._pools = pools
        self._arenas = arenas
        self._limits = limits
        self._changed = changed
        self._publish = publish
        self._clock = clock
        self._spawn = spawn
        self._log = log
        self.edges: list[Edge] = []
        self._index: dict[str, dict[PoolSpec, TierIndex]] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._renewing: list[asyncio.Task[Any]] = []

    def listener(self, name: str) -> Changed:
        """What the tier of this name has to call with its changes."""
        specs = self._index.setdefault(name, {})

        def changed(spec: PoolSpec, events: Sequence[KvEvent]) -> None:
            specs.setdefault(spec, TierIndex()).apply(events)
            self._publish(spec, name, events)

        return changed

    def add(self, tier: LowerTier, policy: EdgePolicy, bytes_per_s: float) -> None:
        """Tiers from above to below, before `start`."""
        self._index.setdefault(tier.name, {})
        self.edges.append(Edge(tier, policy, bytes_per_s, self._limits.queue_blocks))

    async def start(self) -> None:
        """Raise StorageRefused when a tier cannot be used at all."""
        for edge in self.edges:
            await edge.tier.start()
        for edge in self.edges:
            self._renewing.append(self._spawn(self._tell_renewals(edge), name=f"renew leases in {edge.tier.name}"))
            self._tasks.append(self._spawn(self._write_down(edge), name=f"write through to {edge.tier.name}"))

    async def drain(self) -> None:
        """Return when everything that waits was written, or cannot be."""
        for edge in self.edges:
            if not edge.stuck:
                await edge.quiet.wait()
                await self._renew_now(edge)

    async def close(self) -> None:
        """Stop the moves and close the tiers. Idempotent."""
        tasks = [*self._tasks, *self._renewing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()
        self._renewing.clear()
        for edge in self.edges:
            await self._close_tier(edge.tier)

    def index(self, name: str, spec: PoolSpec) -> TierIndex:
        return self._index[name].get(spec) or TierIndex()

    def specs(self, name: str) -> Iterator[tuple[PoolSpec, TierIndex]]:
        return iter(self._index.get(name, {}).items())

    def on_events(self, pool: OpenPool, events: Sequence[KvEvent]) -> None:
        """What has become present in G2 goes down, as far as it may."""
        for event in events:
            if isinstance(event, Stored):
                self.offer(pool, unpack_keys(event.keys))

    def offer(self, pool: OpenPool, keys: Sequence[bytes]) -> None:
        """These blocks were stored or used, or are worth more than before: they may be due for a tier now."""
        for edge in self.edges:
            index = self.index(edge.tier.name, pool.spec)
            due: list[bytes] = []
            for key in keys:
                block = pool.pool.find(key)
                if block is None or block.state is not State.PRESENT or key in index or key in edge.writing:
                    continue
                if edge.tier.name not in block.below and edge.policy.admits(block.directive, block.uses):
                    due.append(key)
            if due:
                edge.push(pool.pool_id, due)

    def lies_in(self, name: str, pool: OpenPool, keys: Sequence[bytes]) -> None:
        """These blocks were read from a tier or written to it: they need not go there again."""
        index = self.index(name, pool.spec)
        for key in keys:
            block = pool.pool.find(key)
            if block is not None and key not in index:
                block.below |= {name}
        for edge in self.edges:
            if edge.tier.name == name:
                edge.queue.discard(pool.pool_id, keys)

    async def give_up(self, pool_id: str) -> None:
        """Return when nobody uses the pool's memory any more; what its blocks have below stays."""
        for edge in self.edges:
            lost = edge.queue.forget(pool_id)
            if lost:
                edge.counters.missed += lost
                self._log.info("not_written_through", pool=pool_id, tier=edge.tier.name, blocks=lost)
        for i, edge in enumerate(self.edges):
            pool, keys = edge.writing_pool, list(edge.writing)
            if pool is not None and pool.pool_id == pool_id:
                # Only the task itself knows how to end a write: it is begun anew.
                self._tasks[i].cancel()
                await asyncio.wait([self._tasks[i]])
                await self._bury(edge, pool.spec, keys)
                self._tasks[i] = self._spawn(self._write_down(edge), name=f"write through to {edge.tier.name}")
                edge.wake.set()

    def renew(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> None:
        """What holds for these blocks from now on, for those tiers that have them; told to them soon, the last word only."""
        for edge in self.edges:
            index = self.index(edge.tier.name, spec)
            renewals = edge.renewals.setdefault(spec, {})
            for key, directive in zip(keys, directives, strict=True):
                if key not in index:
                    continue
                if key in renewals or len(renewals) < self._limits.queue_blocks:
                    renewals[key] = directive
                else:
                    edge.counters.renewals_dropped += 1
            edge.renew.set()

    async def retain(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> set[int]:
        """The same, at once, for blocks that are not in G2. The positions that were to be pinned and are not, in any tier."""
        pinned: set[int] = set()
        refused: set[int] = set()
        for edge in self.edges:
            index = self.index(edge.tier.name, spec)
            places = [i for i, key in enumerate(keys) if key in index]
            if places:
                call = edge.tier.retain(spec, [keys[i] for i in places], [directives[i] for i in places])
                without = {places[i] for i in await self._guarded(edge, call, range(len(places)))}
                refused |= without
                pinned |= set(places) - without
        return {i for i in refused - pinned if directives[i].kind == "pinned"}

    async def _tell_renewals(self, edge: Edge) -> None:
        while True:
            await edge.renew.wait()
            edge.renew.clear()
            await asyncio.sleep(self._limits.gather_s)
            await self._renew_now(edge)

    async def _renew_now(self, edge: Edge) -> None:
        renewals, edge.renewals = edge.renewals, {}
        for spec, said in renewals.items():
            await self._guarded(edge, edge.tier.retain(spec, list(said), list(said.values())), [])

    async def drop(self, spec: PoolSpec, pool_id: str, keys: Sequence[bytes]) -> dict[str, int]:
        """Free these blocks in all tiers, also those that are on their way down; how many were freed, by tier."""
        dropped: dict[str, int] = {}
        for edge in self.edges:
            edge.queue.discard(pool_id, keys)
            edge.doomed |= edge.writing.intersection(keys)
            dropped[edge.tier.name] = await self._guarded(edge, edge.tier.drop(spec, keys), 0)
        return dropped

    async def leading(self, edge: Edge, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        return int(await self._guarded(edge, edge.tier.leading(spec, keys), 0))

    async def read(
        self, edge: Edge, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[BlockMeta]:
        metas: list[BlockMeta] = await self._guarded(edge, edge.tier.read(spec, keys, into), [])
        return metas

    async def _write_down(self, edge: Edge) -> None:
        while True:
            await edge.wake.wait()
            await asyncio.sleep(max(self._limits.gather_s, edge.pacer.wait_s(self._clock())))
            taken = edge.queue.take(self._batch_blocks)
            if taken is None:
                edge.wake.clear()
                edge.quiet.set()
                continue
            pool = self._pools.lookup(taken[0])
            if pool is None:
                continue
            if not await self._guarded(edge, self._write(edge, pool, taken[1]), False):
                edge.stuck = True
                edge.quiet.set()
                await asyncio.sleep(self._limits.retry_s)
            else:
                edge.stuck = False

    def _batch_blocks(self, pool_id: str) -> int:
        pool = self._pools.lookup(pool_id)
        if pool is None:
            return self._limits.queue_blocks
        share = int(pool.pool.slots * self._limits.batch_share)
        return max(1, min(self._limits.batch_bytes // pool.spec.block_bytes, share))

    async def _write(self, edge: Edge, pool: OpenPool, keys: Sequence[bytes]) -> bool:
        """False: the tier cannot be reached; the blocks wait on."""
        gone = [key for key in keys if not pool.pool.moves.leading([key])]
        if gone:
            await self._relay(edge, pool.spec, gone)
        blocks, later = self._choose(edge, pool, keys)
        if not blocks:
            return True
        held = pool.pool.moves.hold([block.key for block in blocks])
        self._changed(pool)
        metas = [meta_of(block) for block in held]
        edge.writing, edge.writing_pool = {block.key for block in held}, pool
        done = [False] * len(held)
        started_s = self._clock()
        data: list[memoryview] = []
        try:
            data = [self._arenas.view(pool.pool_id, block.slot, pool.spec.block_bytes) for block in held]
            done = await self._guarded(edge, edge.tier.write(pool.spec, metas, data), done)
        finally:
            data.clear()
            pool.pool.moves.let_go(held)
            edge.writing, edge.writing_pool = set(), None
            self._changed(pool)
        self.lies_in(edge.tier.name, pool, [block.key for block, ok in zip(held, done, strict=True) if ok])
        # A lease that came meanwhile found the block neither here nor there.
        leased = [block for block, meta in zip(held, metas, strict=True) if block.directive != meta.directive]
        self.renew(pool.spec, [block.key for block in leased], [block.directive for block in leased])
        self._count_written(edge, sum(done), sum(done) * pool.spec.block_bytes, started_s)
        doomed = await self._bury(edge, pool.spec, [block.key for block in held])
        if not any(done) and not edge.tier.usage().available:
            edge.queue.put_back(pool.pool_id, [*(b.key for b in held if b.key not in doomed), *later])
            return False
        edge.counters.refused += len(done) - sum(done)
        if any(done):
            edge.queue.put_back(pool.pool_id, later)
        else:  # what is below of what was refused is refused, too: never again and again
            edge.counters.refused += len(later)
        return True

    async def _relay(self, edge: Edge, spec: PoolSpec, keys: Sequence[bytes]) -> None:
        """These blocks have left G2: those that the tier above has are read there."""
        place = self.edges.index(edge)
        if not place or not edge.tier.usage().available:
            return
        upper = self.edges[place - 1]
        limit = max(1, self._limits.batch_bytes // spec.block_bytes)
        for chain in relays(keys, self.index(upper.tier.name, spec), self.index(edge.tier.name, spec), limit):
            memory = _block_memory(spec, len(chain.keys))
            edge.writing = set(chain.keys)
            try:
                metas = storable(await self.read(upper, spec, chain.keys, memory))
                started_s = self._clock()
                call = edge.tier.write(spec, metas, memory[: len(metas)])
                done = await self._guarded(edge, call, [False] * len(metas))
            finally:
                edge.writing = set()
            self._count_written(edge, sum(done), sum(done) * spec.block_bytes, started_s)
            await self._bury(edge, spec, chain.keys)

    async def _bury(self, edge: Edge, spec: PoolSpec, keys: Sequence[bytes]) -> set[bytes]:
        """What was dropped while it was written is dropped again."""
        doomed, edge.doomed = edge.doomed, set()
        if doomed:
            await self._guarded(edge, edge.tier.drop(spec, [key for key in keys if key in doomed]), 0)
        return doomed

    def _count_written(self, edge: Edge, blocks: int, size_bytes: int, started_s: float) -> None:
        edge.counters.written += blocks
        edge.counters.written_bytes += size_bytes
        edge.counters.write_s += self._clock() - started_s
        edge.pacer.spent(size_bytes, self._clock())

    def _choose(self, edge: Edge, pool: OpenPool, keys: Sequence[bytes]) -> tuple[list[Block], list[bytes]]:
        """The blocks to write, with those above them that the tier lacks; and keys for which this batch has no room."""
        index = self.index(edge.tier.name, pool.spec)
        limit = self._batch_blocks(pool.pool_id)
        chosen: dict[bytes, Block] = {}
        for at, key in enumerate(keys):
            path: list[Block] = []
            block = pool.pool.find(key)
            if block is None or block.state is not State.PRESENT:
                edge.counters.missed += key not in index
                continue
            while block is not None and block.key != ROOT and block.key not in index and block.key not in chosen:
                if edge.tier.name in block.below:
                    break
                path.append(block)
                block = block.parent
            if any(b.directive.kind == "ephemeral" for b in path):
                edge.counters.refused += 1
                continue
            for block in reversed(path):
                if len(chosen) >= limit:
                    return list(chosen.values()), list(keys[at:])
                chosen[block.key] = block
        return list(chosen.values()), []

    async def _guarded(self, edge: Edge, call: Coroutine[Any, Any, Any], otherwise: Any) -> Any:
        """A tier never raises; should it all the same, or should there be no memory, that must not end kvbm."""
        try:
            return await call
        except Exception:
            edge.counters.failures += 1
            self._log.exception("tier_failed", tier=edge.tier.name)
            return otherwise

    async def _close_tier(self, tier: LowerTier) -> None:
        try:
            async with asyncio.timeout(self._limits.close_timeout_s):
                await tier.close()
        except Exception:
            self._log.exception("tier_not_closed", tier=tier.name)


def _block_memory(spec: PoolSpec, blocks: int) -> list[memoryview]:
    """Of our own, for so many blocks."""
    memory = host_memory(spec.block_bytes * blocks)
    return [memory[i * spec.block_bytes : (i + 1) * spec.block_bytes] for i in range(blocks)]


def meta_of(block: Block) -> BlockMeta:
    parent = ROOT if block.parent is None else block.parent.key
    return BlockMeta(block.key, parent, block.depth, block.checksum, block.directive)
