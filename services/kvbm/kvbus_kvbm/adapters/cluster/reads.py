"""Reading blocks from the store of the cluster, and looking for them there."""

import asyncio
from collections import deque
from collections.abc import Sequence

from kvbus_kvbm.adapters.cluster.state import ClusterState
from kvbus_kvbm.adapters.cluster.store import StoreFailed
from kvbus_kvbm.adapters.cluster.waiting import all_of, in_thread, settled
from kvbus_kvbm.adapters.disk.threads import copy
from kvbus_kvbm.core.cluster_objects import (
    HEADER_BYTES,
    BadObject,
    check_object,
    layout_tag,
    object_bytes,
    object_name,
)
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec


class ClusterReads:
    def __init__(self, state: ClusterState) -> None:
        self._state = state

    async def read(self, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        """See `LowerTier.read`. Several at a time, in order; ends at the first that is not there."""
        state, counters = self._state, self._state.counters
        if not keys or not state.reaching.passes("read"):
            counters.misses += len(keys)
            return []
        started_s = state.clock()
        found: list[BlockMeta] = []
        window: deque[asyncio.Task[BlockMeta | None]] = deque()
        begun = 0
        try:
            while len(found) < len(keys):
                while begun < len(keys) and len(window) < state.limits.parallel:
                    window.append(asyncio.create_task(self._fetch(spec, keys[begun], into[begun])))
                    begun += 1
                meta = await window[0]
                window.popleft()
                if meta is None:
                    counters.misses += 1
                    break
                found.append(meta)
        finally:
            for task in window:
                task.cancel()
            await settled(window)
        counters.hits += len(found)
        counters.read_bytes += len(found) * spec.block_bytes
        counters.read_s += state.clock() - started_s
        self._note_read(spec, found)
        state.publish()
        return [self._with_directive(spec, meta) for meta in found]

    async def leading(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        """What we know of, then ever longer steps, then halves: about 2 log2(n) questions. Holes are not seen."""
        state = self._state
        if not state.reaching.passes("read"):
            return 0
        there = state.index.run(spec, keys)
        missing, step = len(keys), 1
        ends_s = state.clock() + state.limits.read_deadline_s
        try:
            while there < missing and state.clock() < ends_s:
                probed = min(there + step, missing) if missing == len(keys) else (there + missing + 1) // 2
                if await self.is_there(spec, keys[probed - 1]):
                    there, step = probed, 2 * step
                else:
                    missing = probed - 1
        except StoreFailed:
            pass
        return there

    async def is_there(self, spec: PoolSpec, key: bytes) -> bool:
        """Raise StoreFailed."""
        name = object_name(layout_tag(spec), key)
        size = await self._state.reaching.call("read", lambda: self._state.store.size(name))
        return size == object_bytes(spec)

    async def are_there(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bool]:
        """Raise StoreFailed."""
        answers: list[bool] = []
        for start in range(0, len(keys), self._state.limits.parallel):
            some = keys[start : start + self._state.limits.parallel]
            answers += await all_of([asyncio.create_task(self.is_there(spec, key)) for key in some])
        return answers

    async def verify(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        """See `LowerTier.verify`. One block at a time: nobody waits for it."""
        bad: list[bytes] = []
        scratch = memoryview(bytearray(spec.block_bytes))
        for key in keys:
            if not self._state.reaching.passes("read"):
                break
            before = self._state.counters.corrupt
            was_here = self._state.index.find(spec, key) is not None
            meta = await self._fetch(spec, key, scratch)
            is_lost = was_here and self._state.index.find(spec, key) is None
            if meta is None and (is_lost or self._state.counters.corrupt > before):
                bad.append(key)
        self._state.publish()
        return bad

    async def _fetch(self, spec: PoolSpec, key: bytes, into: memoryview) -> BlockMeta | None:
        """None: not there, damaged, or nobody can say."""
        state, layout = self._state, layout_tag(spec)
        try:
            name = object_name(layout, key)
            data = await state.reaching.call("read", lambda: state.store.get(name, object_bytes(spec)))
        except StoreFailed:
            return None
        if data is None:
            block = state.index.find(spec, key)
            if block is not None and not block.writing:
                state.lose(block, delete=False)
            return None
        try:
            return await in_thread(lambda: _take(data, key, layout, spec.block_bytes, into))
        except BadObject as problem:
            self._quarantine(spec, key, str(problem))
            return None
        except Exception:
            state.counters.failures += 1
            state.log.exception("g4_read_broke")
            return None

    def _quarantine(self, spec: PoolSpec, key: bytes, reason: str) -> None:
        """Whoever has written it: it is of no use to anybody."""
        state = self._state
        state.counters.corrupt += 1
        name = object_name(layout_tag(spec), key)
        state.log.warning("g4_block_damaged", name=name, reason=reason)
        block = state.index.find(spec, key)
        if block is not None and not block.writing:
            state.lose(block, delete=True)
        if block is None or not block.writing:
            state.doom(name, block)

    def _note_read(self, spec: PoolSpec, found: Sequence[BlockMeta]) -> None:
        """What others have written we answer for from now on, as far as there is room: it is told of as here, too."""
        state = self._state
        used, adopted = [], []
        for meta in found:
            block = state.index.find(spec, meta.key)
            if block is not None:
                if not block.writing:
                    used.append(block)
                continue
            if state.index.used_bytes + object_bytes(spec) <= state.index.capacity_bytes:
                local = state.find_local(meta)
                adopted.append(state.index.insert(spec, local, state.clock(), created=False))
        state.index.use(used)
        state.index.landed(adopted)
        for block in adopted:
            state.ledger.note(block)

    def _with_directive(self, spec: PoolSpec, meta: BlockMeta) -> BlockMeta:
        """What we know of it ourselves is newer than what was written with it."""
        block = self._state.index.find(spec, meta.key)
        return self._state.find_local(meta) if block is None or not block.created else block.meta


def _take(data: memoryview, key: bytes, layout: bytes, block_bytes: int, into: memoryview) -> BlockMeta:
    """Verify and copy. Raise BadObject."""
    meta = check_object(data, key, layout, block_bytes)
    copy(into[:block_bytes], data[HEADER_BYTES:])
    return meta
