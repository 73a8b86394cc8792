"""Writing blocks to the store of the cluster."""

import asyncio
from collections.abc import Sequence

from kvbus_blocks.retention import demotable, shifted
from kvbus_kvbm.adapters.cluster.reads import ClusterReads
from kvbus_kvbm.adapters.cluster.state import ClusterState
from kvbus_kvbm.adapters.cluster.store import StoreFailed
from kvbus_kvbm.adapters.cluster.waiting import in_thread, settled
from kvbus_kvbm.core.cluster_index import ClusterBlock
from kvbus_kvbm.core.cluster_objects import encode_header, layout_tag, object_bytes, object_name
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec


class ClusterWrites:
    """One batch at a time; the caller sees to that."""

    def __init__(self, state: ClusterState, reads: ClusterReads) -> None:
        self._state = state
        self._reads = reads

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        done = [False] * len(blocks)
        fresh = self._known(spec, blocks, data, done)
        try:
            present = await self._written_by_others(spec, [blocks[i] for i in fresh])
        except StoreFailed:
            return done
        placed: dict[int, ClusterBlock] = {}
        for i, is_present in zip(fresh, present, strict=True):
            block = self._place(spec, blocks[i], created=not is_present)
            if block is not None:
                placed[i] = block
        landed: set[int] = set()
        try:
            await self._state.delete_doomed()
            for block in placed.values():
                self._state.ledger.note(block)
            # Before the blocks: nothing must lie in the store that is in nobody's log.
            await self._state.ledger.append()
            landed |= {i for i, block in placed.items() if not block.created}
            await self._put_all(spec, {i: (b, data[i]) for i, b in placed.items() if b.created}, landed)
        except StoreFailed as failure:
            if failure.full:
                self._give_way(len(placed))
        finally:
            self._land(placed, landed)
        for i in landed:
            done[i] = True
        return done

    def _known(
        self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview], done: list[bool]
    ) -> list[int]:
        """Renew what is here; the positions of the others, each key once."""
        state, now_s = self._state, self._state.clock()
        fresh: dict[bytes, int] = {}
        used = []
        for i, meta in enumerate(blocks):
            block = state.index.find(spec, meta.key)
            if block is not None and not block.writing:
                state.index.direct(block, meta.directive, now_s)
                state.ledger.note(block)
                used.append(block)
                done[i] = True
            elif block is None and demotable(meta.directive) and data[i].nbytes == spec.block_bytes:
                fresh.setdefault(meta.key, i)
        state.index.use(used)
        return list(fresh.values())

    async def _written_by_others(self, spec: PoolSpec, blocks: Sequence[BlockMeta]) -> list[bool]:
        """Those below a block that is not there are not there either, so a new chain costs one question. Raise StoreFailed."""
        present: dict[bytes, bool] = {}
        left = list(blocks)
        while left:
            asked: list[bytes] = []
            for meta in left[: self._state.limits.parallel]:
                if present.get(meta.parent, True):
                    asked.append(meta.key)
                else:
                    present[meta.key] = False
                if meta is left[0] and asked:
                    # The first alone: it decides about all others as long as nobody else has written this chain.
                    present.update(zip(asked, await self._reads.are_there(spec, asked), strict=True))
                    asked.clear()
            present.update(zip(asked, await self._reads.are_there(spec, asked), strict=True))
            left = left[self._state.limits.parallel :]
        return [present[meta.key] for meta in blocks]

    def _place(self, spec: PoolSpec, meta: BlockMeta, *, created: bool) -> ClusterBlock | None:
        state = self._state
        if object_bytes(spec) > state.index.capacity_bytes:
            return None
        block = state.index.insert(spec, meta, state.clock(), created=created)
        if state.make_room(spare_pinned=meta.directive.kind != "pinned"):
            return block
        state.index.remove(block)
        return None

    async def _put_all(
        self, spec: PoolSpec, blocks: dict[int, tuple[ClusterBlock, memoryview]], landed: set[int]
    ) -> None:
        """Those that were written are ``landed``. Raise the first StoreFailed; then no other is begun."""
        upcoming = iter(blocks.items())
        failures: list[StoreFailed] = []

        async def put_some() -> None:
            for i, (block, data) in upcoming:
                if failures:
                    return
                try:
                    await self._put(spec, block, data)
                except StoreFailed as failure:
                    failures.append(failure)
                    return
                except Exception as error:  # no memory for the copy, say
                    failures.append(StoreFailed(repr(error)))
                    return
                landed.add(i)

        tasks = [asyncio.create_task(put_some()) for _ in range(min(self._state.limits.parallel, len(blocks)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await settled(tasks)
        if failures:
            raise failures[0]

    async def _put(self, spec: PoolSpec, block: ClusterBlock, data: memoryview) -> None:
        """Raise StoreFailed. ``data`` is copied first: the store may hang with what it was given."""
        state, layout = self._state, layout_tag(spec)
        meta = BlockMeta(
            block.key, block.parent_key, block.depth, block.checksum, shifted(block.directive, state.unix_s)
        )
        whole = await in_thread(lambda: b"".join((encode_header(meta, layout, len(data)), data)))
        name = object_name(layout, block.key)
        state.spare(name)
        await state.reaching.call("write", lambda: state.store.put(name, whole))
        state.counters.written_bytes += len(data)

    def _land(self, placed: dict[int, ClusterBlock], landed: set[int]) -> None:
        """In order: parents before their children. Of the others nobody knows how far they got."""
        self._state.index.landed([placed[i] for i in sorted(landed)])
        for i, block in placed.items():
            if i not in landed:
                self._state.lose(block, delete=True)

    def _give_way(self, blocks: int) -> None:
        """The store is full below our limit: older ones make room for the next batch."""
        state = self._state
        capacity_bytes = state.index.capacity_bytes
        sizes = [shelf.object_bytes for shelf in state.index if shelf.blocks]
        state.index.capacity_bytes = max(0, state.index.used_bytes - blocks * max(sizes, default=0))
        state.make_room(spare_pinned=True)
        state.index.capacity_bytes = capacity_bytes
