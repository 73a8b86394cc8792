"""Two kvbm of different hosts with the same cluster store, in a directory and in S3."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_kvbm.app import start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import RunningService, host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.s3_server import BUCKET, S3Server
from kvbus_testkit.timing import eventually
from kvbus_transfer import checksum
from kvbus_wire.kv_tools import DescribedTiers, DescribeTiers
from kvbus_wire.kvbm import BlockDirective, DropBlocks, DroppedBlocks, PinBlocks, PinnedBlocks, RetainBlocks, Retained
from kvbus_wire.packing import pack_keys

NAMES = [f"x{i}" for i in range(10)]
KEYS = pack_keys(map(key, NAMES))


class Cluster:
    def __init__(self, stack: AsyncExitStack, url: str, namespace: str, folder: Path, store: str) -> None:
        self._stack = stack
        self._url = url
        self._namespace = namespace
        self._folder = folder
        self._store = store

    async def kvbm(self, kvbm_id: str) -> RunningService[KvbmSettings]:
        settings = KvbmSettings(
            nats=self._url,
            namespace=self._namespace,
            instance_id=kvbm_id,
            host_id=f"host-of-{kvbm_id}",
            health_port=-1,
            arena_dir=str(self._folder),
            g2_bytes=32 * 1024,
            tier_gather_s=0.0,
            tier_batch_share=0.5,
            kv_stream_max_bytes=STREAM_BYTES,
            g4_url=self._store,
            g4_bytes=1 << 20,
            g4_flush_s=0.05,
        )
        return await self._stack.enter_async_context(host("kvbm", settings, start))

    async def worker(self, worker_id: str, kvbm_id: str) -> ByHand:
        worker = await self._stack.enter_async_context(by_hand(self._url, self._namespace, worker_id, kvbm_id))
        await worker.attach()
        return worker


@pytest.fixture(params=["directory", "s3"])
async def cluster(
    request: pytest.FixtureRequest,
    nats_server: NatsServer,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Cluster]:
    store = f"file://{tmp_path}/store"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        store = f"s3://{BUCKET}/{namespace}"
    async with AsyncExitStack() as stack:
        yield Cluster(stack, nats_server.url, namespace, tmp_path, store)


async def ask(worker: ByHand, kvbm_id: str, question: Any, reply: type[Any]) -> Any:
    bus = worker.service.bus
    return await bus.request(bus.subjects.control(kvbm_id), question, reply, timeout_s=10)


async def until_in_g4(worker: ByHand, kvbm_id: str, blocks: int, pinned: int = 0) -> None:
    async def is_there() -> Any:
        told: DescribedTiers = await ask(worker, kvbm_id, DescribeTiers(), DescribedTiers)
        held = [held for tier in told.tiers if tier.tier == "g4" for held in tier.holdings]
        return (sum(h.blocks for h in held), sum(h.pinned for h in held)) == (blocks, pinned)

    await eventually(is_there, what=f"{blocks} blocks in G4, {pinned} pinned")


async def onboard(worker: ByHand, names: Sequence[str]) -> list[bytes]:
    blocks: list[bytes] = []
    while True:
        request = PinBlocks(
            pool_id=worker.pool_id,
            instance_id=worker.service.instance_id,
            keys=pack_keys(map(key, names[len(blocks) :])),
            wait_s=10.0,
        )
        pinned: PinnedBlocks = await worker.ask(request, PinnedBlocks)
        for slot in pinned.slots:
            block = bytes(worker.slot(slot.index))
            assert checksum(block) == slot.checksum
            blocks.append(block)
        if pinned.lease_id:
            await worker.release(pinned.lease_id)
        if not pinned.coming:
            return blocks


async def test_what_one_host_computed_another_onboards_also_when_the_first_is_gone(cluster: Cluster) -> None:
    first = await cluster.kvbm("k1")
    a = await cluster.worker("worker-a", "k1")
    await a.offload(NAMES)
    lease = BlockDirective(start=0, end=4, kind="pinned", ttl_s=300.0, tenant="t")
    retain = RetainBlocks(pool_id=a.pool_id, instance_id="worker-a", keys=KEYS, directives=(lease,))
    assert await a.ask(retain, Retained) == Retained()
    await until_in_g4(a, "k1", 10, pinned=4)
    await cluster.kvbm("k2")
    b = await cluster.worker("worker-b", "k2")
    assert await onboard(b, NAMES) == [content(name) for name in NAMES]
    first.service.stop("it goes")
    await cluster.kvbm("k3")
    c = await cluster.worker("worker-c", "k3")
    assert await onboard(c, NAMES) == [content(name) for name in NAMES]
    await until_in_g4(c, "k3", 10)


async def test_a_session_that_ends_frees_what_a_host_that_is_gone_has_left(cluster: Cluster) -> None:
    first = await cluster.kvbm("k1")
    a = await cluster.worker("worker-a", "k1")
    await a.offload(NAMES)
    await until_in_g4(a, "k1", 10)
    await cluster.kvbm("k2")
    b = await cluster.worker("worker-b", "k2")
    first.service.stop("it goes")
    dropped: DroppedBlocks = await ask(b, "k2", DropBlocks(model="tiny", keys=KEYS), DroppedBlocks)
    assert dropped.blocks["g4"] == 10
    await cluster.kvbm("k3")
    c = await cluster.worker("worker-c", "k3")
    assert await onboard(c, NAMES) == []
