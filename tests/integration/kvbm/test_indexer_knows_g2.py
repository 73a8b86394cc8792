"""The indexer learns what kvbm holds: from the events, and from a snapshot when it comes later than the events."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_indexer.app import start as start_indexer
from kvbus_indexer.settings import IndexerSettings
from kvbus_kvbm.app import start as start_kvbm
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_wire.indexer import IndexQuery, IndexReply
from kvbus_wire.packing import pack_keys


class Stage:
    def __init__(self, stack: AsyncExitStack, common: dict[str, Any], arena_dir: Path) -> None:
        self._stack = stack
        self._common = common
        self._arena_dir = arena_dir

    async def kvbm(self, stack: AsyncExitStack | None = None) -> None:
        settings = KvbmSettings(
            **self._common, instance_id="kvbm-1", arena_dir=str(self._arena_dir), g2_bytes=64 * 1024
        )
        await (stack or self._stack).enter_async_context(host("kvbm", settings, start_kvbm))

    async def indexer(self) -> None:
        await self._stack.enter_async_context(host("indexer", IndexerSettings(**self._common), start_indexer))

    async def worker(self) -> ByHand:
        nats_url, namespace = self._common["nats"], self._common["namespace"]
        return await self._stack.enter_async_context(by_hand(nats_url, namespace, "worker-a", "kvbm-1"))


@pytest.fixture
async def stage(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    common = {
        "nats": nats_server.url,
        "namespace": namespace,
        "health_port": -1,
        "kv_stream_max_bytes": STREAM_BYTES,
        "lease_ttl_s": 2,
    }
    async with AsyncExitStack() as stack:
        yield Stage(stack, common, tmp_path)


async def depth_is(worker: ByHand, names: Sequence[str], depth: int) -> None:
    bus = worker.service.bus

    async def look() -> bool:
        query = IndexQuery(model="tiny", keys=pack_keys(map(key, names)))
        try:
            reply: IndexReply = await bus.request(bus.subjects.index_query("tiny"), query, IndexReply, timeout_s=5)
        except RequestFailed:
            return False
        return [(m.instance_id, m.tier, m.depth) for m in reply.matches] == ([("kvbm-1", "g2", depth)] if depth else [])

    looking: Any = look
    await eventually(looking, what=f"a depth of {depth}")


async def test_events_bring_and_take_depth(stage: Stage) -> None:
    await stage.indexer()
    await stage.kvbm()
    worker = await stage.worker()
    await worker.attach()
    await worker.offload(["a", "b", "c"])
    await depth_is(worker, ["a", "b", "c", "d"], 3)
    pinned = await worker.pin(["a", "b"])
    await worker.release(pinned.lease_id, corrupt=[1])
    await depth_is(worker, ["a", "b", "c"], 1)


async def test_an_indexer_that_comes_late_and_a_kvbm_that_is_replaced(stage: Stage) -> None:
    async with AsyncExitStack() as first_life:
        await stage.kvbm(first_life)
        worker = await stage.worker()
        await worker.attach()
        await worker.offload(["a", "b", "c"])
        await stage.indexer()
        await depth_is(worker, ["a", "b", "c"], 3)
    await depth_is(worker, ["a", "b", "c"], 0)
    await stage.kvbm()
    await worker.attach()
    await worker.offload(["a", "b"])
    await depth_is(worker, ["a", "b", "c"], 2)
