"""What workers and frontends tell kvbm of the future of blocks, on a real bus."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus_kvbm.app import start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import RunningService, host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import (
    BlockDirective,
    DropBlocks,
    DroppedBlocks,
    ReserveBlocks,
    ReservedBlocks,
    RetainBlocks,
    Retained,
)
from kvbus_wire.packing import pack_keys

SLOTS = 8
PINNED = BlockDirective(start=0, end=8, kind="pinned", ttl_s=600.0, tenant="t")


@pytest.fixture
async def kvbm(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[RunningService[KvbmSettings]]:
    settings = KvbmSettings(
        nats=nats_server.url,
        namespace=namespace,
        instance_id="kvbm-1",
        host_id="host-1",
        arena_dir=str(tmp_path),
        g2_bytes=SLOTS * 1024,
        pool_share=1.0,
        g2_pin_share=0.5,
        health_port=-1,
        kv_stream_max_bytes=STREAM_BYTES,
    )
    async with host("kvbm", settings, start) as running:
        yield running


@pytest.fixture
async def worker(kvbm: RunningService[KvbmSettings], nats_server: NatsServer, namespace: str) -> AsyncIterator[ByHand]:
    async with by_hand(nats_server.url, namespace, "worker-a", "kvbm-1") as worker:
        await worker.attach()
        yield worker


async def retain(worker: ByHand, names: str, *directives: BlockDirective) -> tuple[int, ...]:
    request = RetainBlocks(
        pool_id=worker.pool_id,
        instance_id=worker.service.instance_id,
        keys=pack_keys(map(key, names)),
        directives=directives,
    )
    retained: Retained = await worker.ask(request, Retained)
    return retained.unpinned


async def drop(worker: ByHand, names: str, model: str = "tiny") -> dict[str, int]:
    subject = worker.service.bus.subjects.control("kvbm-1")
    request = DropBlocks(model=model, keys=pack_keys(map(key, names)))
    dropped: DroppedBlocks = await worker.service.bus.request(subject, request, DroppedBlocks, timeout_s=10)
    return dropped.blocks


async def test_pinned_blocks_outlast_what_comes_after_them(kvbm: RunningService[KvbmSettings], worker: ByHand) -> None:
    await worker.offload("ab")
    assert await retain(worker, "ab", PINNED) == ()
    for name in "qrstuvwxyz":
        await worker.offload(name)
    assert await worker.onboard("ab") == [content("a"), content("b")]
    metrics, labels = kvbm.service.metrics, {"model": "tiny", "pool": worker.pool_id}
    assert metrics.value("blocks_retained", labels) == 2
    assert metrics.value("block_evictions_total", {**labels, "class": "normal"}) == 4


async def test_a_directive_comes_with_the_reservation_too(worker: ByHand) -> None:
    request = ReserveBlocks(
        pool_id=worker.pool_id,
        instance_id=worker.service.instance_id,
        parent=b"",
        keys=pack_keys(map(key, "ab")),
        directives=(BlockDirective(start=0, end=2, kind="ephemeral"),),
    )
    reserved = await worker.ask(request, ReservedBlocks)
    await worker.commit(reserved.lease_id, worker.write("ab", reserved))
    await worker.offload("rstuvw")
    await worker.offload("yz")
    assert await worker.onboard("ab") == []
    assert await worker.onboard("rstuvw") == [content(name) for name in "rstuvw"]


async def test_pins_beyond_the_share_of_a_tenant_are_named_in_the_answer(
    kvbm: RunningService[KvbmSettings], worker: ByHand
) -> None:
    await worker.offload("abcdef")
    assert await retain(worker, "abcdef", PINNED) == (4, 5)
    assert kvbm.service.metrics.value("blocks_unpinned_total", {"model": "tiny", "pool": worker.pool_id}) == 2


async def test_dropped_blocks_are_gone_at_once_and_a_model_without_blocks_has_none_to_drop(worker: ByHand) -> None:
    await worker.offload("abc")
    assert await drop(worker, "abc", model="another") == {"g2": 0}
    assert await drop(worker, "abc") == {"g2": 3}
    assert await worker.onboard("abc") == []
    assert await drop(worker, "abc") == {"g2": 0}


@pytest.mark.parametrize("ttl_s", [float("nan"), -1.0])
async def test_a_directive_without_sense_is_refused(worker: ByHand, ttl_s: float) -> None:
    await worker.offload("a")
    with pytest.raises(RequestFailed) as refused:
        await retain(worker, "a", BlockDirective(start=0, end=1, kind="pinned", ttl_s=ttl_s))
    assert refused.value.reply.code == ErrorCode.INVALID_REQUEST
    assert await retain(worker, "a", BlockDirective(start=0, end=1, kind="pinned", ttl_s=1e300)) == ()
