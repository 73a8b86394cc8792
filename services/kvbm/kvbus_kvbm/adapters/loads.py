"""Blocks on their way up, from the tiers below into G2: one load per block, whoever asks for it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.adapters.tiers import Edge, Spawn, Tiers
from kvbus_kvbm.core.block import Block
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import OpenPool
from kvbus_kvbm.core.write_through import LoadLimits

_AHEAD = 4
"""Room is made for so many times what is read at once: when the last of it is on its way, nothing else is."""


class LoadCounters(msgspec.Struct):
    """Blocks brought up, and loads that ended early for want of room in G2, at their deadline, or were refused as too many."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    no_room: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0


class Load:
    """A piece of a chain that is brought up. ``at``: so many of its blocks were there; ``asked`` and ``has``: see
    `Loads`. ``tiers``: only these are read (empty: all); ``reading``: the one that is read now."""

    def __init__(self, pool: OpenPool, parent: bytes, keys: Sequence[bytes], tiers: Collection[str] = ()) -> None:
        self.pool = pool
        self.parent = parent
        self.keys = list(keys)
        self.place = {key: i for i, key in enumerate(self.keys)}
        self.at = 0
        # Up to where each tier was asked, and up to where it has the blocks.
        self.asked: dict[str, int] = {}
        self.has: dict[str, int] = {}
        self.tiers = frozenset(tiers)
        self.reading = ""
        self.over = False
        self.moved = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    @property
    def above(self) -> bytes:
        """The block that the next one hangs on."""
        return self.keys[self.at - 1] if self.at else self.parent

    def reads(self, tier: str) -> bool:
        return not self.tiers or tier in self.tiers

    def also_read(self, tiers: Collection[str]) -> None:
        self.tiers = self.tiers.union(tiers) if self.tiers and tiers else frozenset()

    def advance(self, to: int) -> None:
        self.at = to
        self.stir()

    def stir(self) -> None:
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()

    def extend(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.place[key] = len(self.keys)
            self.keys.append(key)


class Loads:
    """``changed`` is called with a pool into which something came up."""

    def __init__(
        self,
        tiers: Tiers,
        arenas: Arenas,
        limits: LoadLimits,
        *,
        changed: Callable[[OpenPool], None],
        clock: Callable[[], float],
        spawn: Spawn,
        log: Any,
    ) -> None:
        self._tiers = tiers
        self._arenas = arenas
        self._limits = limits
        self._changed = changed
        self._clock = clock
        self._spawn = spawn
        self._log = log
        self._readers = asyncio.Semaphore(limits.parallel)
        self._loads: dict[str, dict[bytes, Load]] = {}
        self._living: set[Load] = set()
        self.counters: dict[str, LoadCounters] = {}

    def __len__(self) -> int:
        return len(self._living)

    def bring_up(
        self, pool: OpenPool, keys: Sequence[bytes], parent: bytes = ROOT, tiers: Collection[str] = ()
    ) -> Load | None:
        """Begin to load blocks that are not present, or join the load that brings them. ``parent``: of the first, or the root.
        ``tiers``: where from (empty: wherever they are).

        None: there is nothing below, or too much is under way.
        """
        if not keys or not any(not tiers or edge.tier.name in tiers for edge in self._tiers.edges):
            return None
        known = self._loads.setdefault(pool.pool_id, {})
        load = known.get(keys[0])
        if load is not None:
            self._join(load, keys, tiers)
            return load
        if len(self._living) >= self._limits.max_loads:
            self._counters_of("g2").refused += 1
            return None
        above, before = self._beginning(pool, keys[0], parent)
        load = Load(pool, above, [*before, *keys], tiers)
        if before and before[0] in known:
            self._join(known[before[0]], load.keys, tiers)
            return known[before[0]]
        self._living.add(load)
        for key in load.keys:
            known.setdefault(key, load)
        load.task = self._spawn(self._run(load), name="bring up")
        load.task.add_done_callback(lambda _: self._is_over(load))
        return load

    def coming(self, load: Load, keys: Sequence[bytes]) -> int:
        """How many leading blocks of ``keys``, none of them present, the load will probably bring; at least one while it asks."""
        if load.over or not keys or keys[0] not in load.place:
            return 0
        start = load.place[keys[0]]
        same = 0
        while same < len(keys) and start + same < len(load.keys) and load.keys[start + same] == keys[same]:
            same += 1
        reach = max([load.at, *load.has.values()])
        spec = load.pool.spec
        for edge in self._edges_of(load):
            reach = max(reach, reach + self._tiers.index(edge.tier.name, spec).leading(load.keys[reach:]))
        return max(1, min(same, reach - start)) if start >= load.at else 0

    async def wait(self, load: Load, key: bytes, wait_s: float) -> None:
        """Return when the block is present, or will not come, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while not load.over and load.place.get(key, len(load.keys)) >= load.at:
                    await load.moved.wait()
        except TimeoutError:
            return

    async def give_up(self, pool_id: str) -> None:
        """Return when no load writes into the pool any more."""
        await self._end([load for load in self._living if load.pool.pool_id == pool_id])
        self._loads.pop(pool_id, None)

    async def stop(self, pool_id: str, keys: Sequence[bytes]) -> None:
        """These blocks are not wanted any more. Return when nobody brings them up."""
        known = self._loads.get(pool_id, {})
        await self._end({known[key] for key in keys if key in known})

    async def _end(self, loads: Collection[Load]) -> None:
        tasks = [load.task for load in loads if load.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        for pool_id in list(self._loads):
            await self.give_up(pool_id)

    def _edges_of(self, load: Load) -> list[Edge]:
        return [edge for edge in self._tiers.edges if load.reads(edge.tier.name)]

    def _join(self, load: Load, keys: Sequence[bytes], tiers: Collection[str]) -> None:
        """The load brings what it has in common with ``keys``, and what follows if it ends there."""
        load.also_read(tiers)
        start = load.place[keys[0]]
        tail = load.keys[start:]
        if len(keys) > len(tail) and list(keys[: len(tail)]) == tail:
            more = keys[len(tail) :]
            load.extend(more)
            known = self._loads[load.pool.pool_id]
            for key in more:
                known.setdefault(key, load)

    def _beginning(self, pool: OpenPool, first: bytes, parent: bytes) -> tuple[bytes, list[bytes]]:
        """What has to come up before ``first``, as far as the tiers know its chain: a block needs its whole prefix in G2."""
        before: list[bytes] = []
        key, above = first, parent
        while above == ROOT or not pool.pool.moves.leading([above]):
            if above != ROOT:
                before.append(above)
                key = above
            above = self._parent_below(pool, key)
            if above == ROOT:
                break
        return above, before[::-1]

    def _parent_below(self, pool: OpenPool, key: bytes) -> bytes:
        """The parent of a block as the tiers know it; the root where they do not."""
        for edge in self._tiers.edges:
            parent = self._tiers.index(edge.tier.name, pool.spec).parent(key)
            if parent is not None:
                return parent
        return ROOT

    async def _run(self, load: Load) -> None:
        try:
            async with asyncio.timeout(self._limits.deadline_s), self._readers:
                while load.at < len(load.keys) and await self._step(load):
                    pass
        except TimeoutError:
            self._counters_of("g2").late += 1
        except Exception:
            # Whatever it was, it is this load's: the worker computes.
            self._counters_of("g2").failed += 1
            self._log.exception("load_failed", pool=load.pool.pool_id, blocks=load.at)

    def _is_over(self, load: Load) -> None:
        """Also where its task was cancelled before it began."""
        load.over = True
        self._living.discard(load)
        known = self._loads.get(load.pool.pool_id, {})
        for key in load.keys:
            if known.get(key) is load:
                del known[key]
        load.stir()

    async def _step(self, load: Load) -> bool:
        """Bring the next few blocks up. False: there are no more."""
        pool = load.pool
        present = pool.pool.moves.leading(load.keys[load.at :])
        if present:
            load.advance(load.at + present)
            return True
        for edge in self._edges_of(load):
            count = await self._reach(edge, load, _AHEAD * self._limits.depth * self._chunk_blocks(pool))
            if count and await self._read(edge, load, count):
                return True
        return False

    async def _reach(self, edge: Edge, load: Load, limit: int) -> int:
        """How many blocks from here on the tier probably has; no more than ``limit`` are looked at."""
        name, at = edge.tier.name, load.at
        known = self._tiers.index(name, load.pool.spec).leading(load.keys[at : at + limit])
        if known or name == "g3":  # a disk has nothing but what it has told
            return known
        if load.has.get(name, 0) <= at and load.asked.get(name, 0) <= at:
            load.asked[name] = len(load.keys)
            load.reading = name
            found = await self._tiers.leading(edge, load.pool.spec, load.keys[at:])
            load.has[name] = at + found
            load.stir()
        return min(limit, max(0, load.has.get(name, 0) - at))

    async def _read(self, edge: Edge, load: Load, count: int) -> bool:
        """Read blocks into G2, ``depth`` pieces at the same time. False: none came."""
        pool, counters = load.pool, self._counters_of(edge.tier.name)
        blocks: list[Block] = pool.pool.moves.make_room(load.above, load.keys[load.at : load.at + count])
        if not blocks:
            counters.no_room += 1
            return False
        load.reading = edge.tier.name
        size = self._chunk_blocks(pool)
        pieces = [blocks[at : at + size] for at in range(0, len(blocks), size)]
        before, started_s, turns = load.at, self._clock(), asyncio.Semaphore(self._limits.depth)
        try:
            # Cancelled: the group cancels all of them, and each gives its slots back before it ends.
            async with asyncio.TaskGroup() as group:
                for piece in pieces:
                    group.create_task(self._read_piece(edge, load, piece, turns))
        finally:
            counters.seconds += self._clock() - started_s
        return load.at > before

    async def _read_piece(self, edge: Edge, load: Load, blocks: Sequence[Block], turns: asyncio.Semaphore) -> None:
        pool = load.pool
        metas: list[BlockMeta] = []
        try:
            into = [self._arenas.view(pool.pool_id, block.slot, pool.spec.block_bytes) for block in blocks]
            async with turns:
                metas = await self._tiers.read(edge, pool.spec, [block.key for block in blocks], into)
        finally:
            came = pool.pool.moves.fill(blocks, metas)
            self._changed(pool)
            self._tiers.lies_in(edge.tier.name, pool, [block.key for block in blocks[: len(metas)]])
            for block in blocks[: len(metas)]:  # also those that become present with what a later piece brings
                block.source = edge.tier.name
            counters = self._counters_of(edge.tier.name)
            counters.blocks += came
            counters.bytes += came * pool.spec.block_bytes
            present = pool.pool.moves.leading(load.keys[load.at :])
            if present:
                load.advance(load.at + present)

    def _chunk_blocks(self, pool: OpenPool) -> int:
        return max(1, self._limits.chunk_bytes // pool.spec.block_bytes)

    def _counters_of(self, tier: str) -> LoadCounters:
        return self.counters.setdefault(tier, LoadCounters())
