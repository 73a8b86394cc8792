"""A kvbm whose lower tiers do what the test tells them, and workers that ask it for blocks."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.lower_tiers import TierPlan
from kvbus_kvbm.app import KvbmApp
from kvbus_kvbm.core.lower import BlockMeta, Changed, TierCounters, TierUsage
from kvbus_kvbm.core.pools import PoolSpec
from kvbus_kvbm.core.write_through import EdgePolicy
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import RunningService, Service, host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, key
from kvbus_transfer import checksum
from kvbus_wire.kv_events import Removed, Stored
from kvbus_wire.kvbm import (
    PinBlocks,
    PinnedBlocks,
)
from kvbus_wire.packing import pack_keys

KVBM_ID = "kvbm-1"


class FakeTier:
    """Keeps blocks in a dict. ``open`` unset: it hangs; ``broken``: nothing works; ``raises``: against the rules."""

    def __init__(self, name: str, changed: Changed) -> None:
        self.name = name
        self.counters = TierCounters()
        self.open = asyncio.Event()
        self.open.set()
        self.capacity = 1 << 20
        self.broken = self.raises = self.closed = False
        self.held: dict[bytes, tuple[BlockMeta, bytes]] = {}
        self.reads: list[list[bytes]] = []
        self.asked = 0
        self.busy = 0
        self._changed = changed

    def usage(self) -> TierUsage:
        return TierUsage(blocks=len(self.held), used_bytes=0, capacity_bytes=1 << 30, available=not self.broken)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def find(self, spec: PoolSpec, key: bytes) -> BlockMeta | None:
        held = self.held.get(key)
        return None if held is None else held[0]

    async def leading(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        self.asked += 1
        await self._work()
        found = [k in self.held for k in keys]
        return found.index(False) if False in found else len(found)

    async def write(self, spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        await self._work()
        if self.broken or len(self.held) >= self.capacity:
            return [False] * len(blocks)
        for meta, view in zip(blocks, data, strict=True):
            assert not meta.parent or meta.parent in self.held, "parents before children"
            assert checksum(view) == meta.checksum
            if meta.key not in self.held:
                self._changed(spec, [Stored(meta.parent, meta.key)])
            self.held[meta.key] = meta, bytes(view)
        return [True] * len(blocks)

    async def read(self, spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        self.reads.append(list(keys))
        await self._work()
        metas: list[BlockMeta] = []
        for k, view in zip(keys, into, strict=True):
            if self.broken or k not in self.held:
                break
            meta, data = self.held[k]
            view[:] = data
            metas.append(meta)
        return metas

    async def retain(self, spec: PoolSpec, keys: Sequence[bytes], directives: Sequence[Directive]) -> list[int]:
        await self._work()
        for k, directive in zip(keys, directives, strict=True):
            if k in self.held:
                self.held[k] = msgspec.structs.replace(self.held[k][0], directive=directive), self.held[k][1]
        return []

    async def drop(self, spec: PoolSpec, keys: Sequence[bytes]) -> int:
        gone = [k for k in reversed(keys) if self.held.pop(k, None)]
        if gone:
            self._changed(spec, [Removed(pack_keys(gone))])
        return len(gone)

    async def verify(self, spec: PoolSpec, keys: Sequence[bytes]) -> list[bytes]:
        return []

    async def _work(self) -> None:
        self.busy += 1
        try:
            await self.open.wait()
            if self.raises:
                raise OSError("the medium is on fire")
        finally:
            self.busy -= 1


class Stage:
    """One kvbm with the tiers of the test, and its workers."""

    def __init__(self, stack: AsyncExitStack, nats_url: str, namespace: str, arena_dir: Path) -> None:
        self._stack = stack
        self._nats_url = nats_url
        self._namespace = namespace
        self._arena_dir = arena_dir
        self.tiers: dict[str, FakeTier] = {}
        self.policies: dict[str, str] = {}

    async def kvbm(self, *names: str, **fields: Any) -> RunningService[KvbmSettings]:
        values: dict[str, Any] = {
            "g2_bytes": 16 * 1024,
            "pool_share": 1.0,
            "tier_batch_share": 0.25,
            "tier_gather_s": 0.0,
            "tier_retry_s": 0.05,
            "instance_id": KVBM_ID,
            "host_id": "host-1",
            "health_port": -1,
            "kv_stream_max_bytes": STREAM_BYTES,
            **fields,
        }
        settings = KvbmSettings(
            nats=self._nats_url, namespace=self._namespace, arena_dir=str(self._arena_dir), **values
        )

        def make(settings: KvbmSettings, listener: Any, **_: Any) -> list[TierPlan]:
            for name in names:
                self.tiers[name] = FakeTier(name, listener(name))
            return [TierPlan(self.tiers[name], EdgePolicy.parse(self.policies.get(name, "all"))) for name in names]

        async def begin(service: Service, settings: KvbmSettings) -> KvbmApp:
            app = KvbmApp(service, settings, make)
            await app.start()
            return app

        return await self._stack.enter_async_context(host("kvbm", settings, begin))

    async def worker(self, instance_id: str = "worker-a") -> ByHand:
        worker = await self._stack.enter_async_context(by_hand(self._nats_url, self._namespace, instance_id, KVBM_ID))
        await worker.attach()
        return worker


def app_of(running: RunningService[KvbmSettings]) -> KvbmApp:
    assert isinstance(running.app, KvbmApp)
    for pool in running.app.pools:
        pool.pool.check_integrity()
    return running.app


async def bring(worker: ByHand, names: Sequence[str], wait_s: float = 5.0, tiers: tuple[str, ...] = ()) -> PinnedBlocks:
    request = PinBlocks(
        pool_id=worker.pool_id,
        instance_id=worker.service.instance_id,
        keys=pack_keys(map(key, names)),
        wait_s=wait_s,
        tiers=tiers,
    )
    pinned: PinnedBlocks = await worker.ask(request, PinnedBlocks)
    return pinned


async def onboard(worker: ByHand, names: Sequence[str]) -> list[bytes]:
    """All that can be had, as a worker asks for it: again, for what follows, while something is coming."""
    blocks: list[bytes] = []
    while True:
        pinned = await bring(worker, names[len(blocks) :])
        for slot in pinned.slots:
            block = bytes(worker.slot(slot.index))
            assert checksum(block) == slot.checksum
            blocks.append(block)
        if pinned.lease_id:
            await worker.release(pinned.lease_id)
        if not pinned.coming:
            return blocks


async def evict_all(worker: ByHand, running: RunningService[KvbmSettings]) -> None:
    """G2 forgets everything (as under pressure), its tiers do not."""
    for pool in app_of(running).pools:
        pool.pool.clear()
        app_of(running)._changed(pool)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]
