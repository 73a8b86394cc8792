"""G4: blocks in a store that all hosts of the cluster share.

Each kvbm counts and evicts what it has written; it reads what anybody has. Two that write the same block write the same bytes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.cluster.reads import ClusterReads
from kvbus_kvbm.adapters.cluster.state import ClusterState
from kvbus_kvbm.adapters.cluster.store import ClusterStore, StoreFailed
from kvbus_kvbm.adapters.cluster.waiting import settled
from kvbus_kvbm.adapters.cluster.writes import ClusterWrites
from kvbus_kvbm.core.cluster_limits import ClusterLimits
from kvbus_kvbm.core.cluster_objects import layout_tag, object_name
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_kvbm.core.lower import BlockMeta, Changed, TierCounters, TierUsage
from kvbus_kvbm.core.spec import PoolSpec

_MAX_WAITING_WRITES = 8


class ClusterTier:
    """A `LowerTier`. ``owner``: this kvbm's name in the store, the same after a restart, of no other one. ``clock``: that of the
    directives' times."""

    name = "g4"

    def __init__(
        self,
        store: ClusterStore,
        limits: ClusterLimits,
        *,
        owner: str,
        changed: Changed,
        log: Any,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = TierCounters()
        self._state = ClusterState(
            store, limits, self.counters, owner=owner, changed=changed, log=log, clock=clock, unix_clock=unix_clock
        )
        self._reads = ClusterReads(self._state)
        self._writes = ClusterWrites(self._state, self._reads)
        self._writing = asyncio.Lock()
        self._waiting_writes = 0
        self._wake = asyncio.Event()
        self._is_recovered = False
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """The store, for people."""
        return self._state.store.place

    def usage(self) -> TierUsage:
        index, reaching = self._state.index, self._state.reaching
        return TierUsage(
            blocks=index.blocks,
            used_bytes=index.used_bytes,
            capacity_bytes=index.capacity_bytes,
            available=self._is_recovered and reaching.is_closed("read") and reaching.is_closed("write"),
        )

    @property
    def specs(self) -> list[PoolSpec]:
        """What there are blocks of."""
        return [shelf.spec for shelf in self._state.index if shelf.blocks]

    async def start(self) -> None:
        """A store that does not answer now may do so later; one that refuses us needs a person."""
        try:
            await self._recover()
        except StoreFailed as failure:
            if failure.refused:
                raise StorageRefused(f"g4_url: {failure}") from failure
        self._upkeep = asyncio.create_task(self._keep_up(), name="g4 upkeep")

    async def close(self) -> None:
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is None:
            return
        upkeep.cancel()
        await settled([upkeep])
        if self._is_recovered:
            with suppress(StoreFailed):
                await self._write_down()
        await self._state.store.close()

    def find(self, spec: PoolSpec, key: bytes) -> BlockMeta | None:
        block = self._state.index.find(spec, key)
        return block.meta if block is not None and block.told else None

    async def leading(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        return await self._reads.leading(spec, keys)

    async def read(self, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        try:
            return await self._reads.read(spec, keys, into)
        finally:
            self._wake_if_due()

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        started_s = self._state.clock()
        done = [False] * len(blocks)
        # What is written is looked for first: both have to work.
        if blocks and self._waiting_writes < _MAX_WAITING_WRITES and self._state.reaching.passes("write", "read"):
            self._waiting_writes += 1
            try:
                async with asyncio.timeout(self._state.limits.write_deadline_s):
                    await self._writing.acquire()
            except TimeoutError:
                pass
            else:
                try:
                    if self._is_recovered or await self._recovers():
                        done = await self._writes.write(spec, blocks, data)
                finally:
                    self._writing.release()
                    self._state.publish()
                    self._wake_if_due()
            finally:
                self._waiting_writes -= 1
        self.counters.stored += sum(done)
        self.counters.refused += len(done) - sum(done)
        self.counters.write_s += self._state.clock() - started_s
        return done

    async def retain(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> list[int]:
        """What others have written is theirs to keep: nothing is promised for it."""
        refused = []
        now_s = self._state.clock()
        for position, (key, directive) in enumerate(zip(keys, directives, strict=True)):
            block = self._state.index.find(spec, key)
            if block is None:
                continue
            before = block.directive
            if self._state.index.direct(block, directive, now_s):
                refused.append(position)
            if block.directive != before:
                self._state.ledger.note(block)
        return refused

    async def drop(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        """Also what others have written: whoever wrote it may be gone."""
        state, index = self._state, self._state.index
        own = [block for block in (index.find(spec, key) for key in dict.fromkeys(keys)) if block is not None]
        others = [key for key in dict.fromkeys(keys) if index.find(spec, key) is None]
        layout = layout_tag(spec)
        dropped = 0
        for block in sorted(own, key=lambda block: -block.depth):
            if block.is_evictable:
                index.remove(block)
                state.doom(object_name(layout, block.key), block)
                dropped += 1
        state.publish()
        waiting = index.shelf(spec).waiting
        with suppress(StoreFailed, TimeoutError):
            if state.reaching.passes("read"):
                asked = [key for key in others if key not in waiting]
                for key, is_there in zip(asked, await self._reads.are_there(spec, asked), strict=True):
                    if is_there and index.find(spec, key) is None:
                        state.doom(object_name(layout, key))
                        dropped += 1
            # Not beside a write, which may be writing what is being deleted.
            async with asyncio.timeout(state.limits.write_deadline_s), self._writing:
                await state.delete_doomed()
        self._wake_if_due()
        return dropped

    async def verify(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        try:
            return await self._reads.verify(spec, keys)
        finally:
            self._wake_if_due()

    async def _recovers(self) -> bool:
        try:
            await self._recover()
        except StoreFailed:
            return False
        return True

    async def _recover(self) -> None:
        """Learn what an earlier life has left. Raise StoreFailed."""
        state = self._state
        blocks, unsure = await state.ledger.load()
        missing: set[tuple[PoolSpec, bytes]] = set()
        for spec in {spec for spec, _ in unsure}:
            keys = [kept.key for of, kept in unsure if of == spec]
            there = await self._reads.are_there(spec, keys)
            missing |= {(spec, key) for key, is_there in zip(keys, there, strict=True) if not is_there}
        await state.take_over([(spec, kept) for spec, kept in blocks if (spec, kept.key) not in missing])
        self._is_recovered = True
        state.publish()
        await state.rewrite_log()
        state.log.info("g4_recovered", place=self.place, blocks=state.index.blocks, missing=len(missing))

    def _wake_if_due(self) -> None:
        if self._state.doomed:
            self._wake.set()

    async def _keep_up(self) -> None:
        """Delete what is to be deleted, write down what has changed, come back to a store that was away."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._state.limits.flush_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                async with self._writing:
                    await self._write_down()
            except StoreFailed:
                # Woken or not: a store that fails is not asked again at once.
                await asyncio.sleep(self._state.limits.rest_s)
            except Exception:
                self._state.log.exception("g4_upkeep_failed")
                await asyncio.sleep(self._state.limits.rest_s)

    async def _write_down(self) -> None:
        """Raise StoreFailed."""
        state = self._state
        if not self._is_recovered:
            if state.reaching.passes("read"):
                await self._recover()
            return
        if state.doomed and state.reaching.passes("delete"):
            await state.delete_doomed()
        if state.ledger.pending and state.reaching.passes("write"):
            await state.ledger.append()
        if state.ledger.is_due(state.index.blocks) and state.reaching.passes("write"):
            await state.rewrite_log()
        state.publish()
