"""kvbm on a real bus, with workers by hand."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_kvbm.app import KvbmApp, start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.service import RunningService, host
from kvbus_testkit.kvbm import BLOCK_BYTES, STREAM_BYTES, ByHand, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import Cleared, KvEvents, Removed, Stored, decode_events
from kvbus_wire.packing import unpack_keys
from kvbus_wire.worker import Done, Drain

KVBM_ID = "kvbm-1"


class Stage:
    """One kvbm and the workers that a test asks for."""

    def __init__(self, stack: AsyncExitStack, nats_url: str, namespace: str, arena_dir: Path) -> None:
        self._stack = stack
        self._nats_url = nats_url
        self._namespace = namespace
        self.arena_dir = arena_dir

    def settings(self, **fields: Any) -> KvbmSettings:
        values: dict[str, Any] = {
            "g2_bytes": 64 * 1024,
            "instance_id": KVBM_ID,
            "host_id": "host-1",
            "health_port": -1,
            "kv_stream_max_bytes": STREAM_BYTES,
            **fields,
        }
        return KvbmSettings(nats=self._nats_url, namespace=self._namespace, arena_dir=str(self.arena_dir), **values)

    async def kvbm(self, **fields: Any) -> RunningService[KvbmSettings]:
        return await self._stack.enter_async_context(host("kvbm", self.settings(**fields), start))

    async def worker(self, instance_id: str) -> ByHand:
        return await self._stack.enter_async_context(by_hand(self._nats_url, self._namespace, instance_id, KVBM_ID))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.arena_dir.iterdir())


@pytest.fixture
async def stage(nats_server: NatsServer, namespace: str, tmp_path: Path) -> Any:
    async with AsyncExitStack() as stack:
        yield Stage(stack, nats_server.url, namespace, tmp_path)


def app_of(running: RunningService[KvbmSettings]) -> KvbmApp:
    assert isinstance(running.app, KvbmApp)
    return running.app


async def follow(worker: ByHand) -> list[KvEvents]:
    """The batches of KV events of the namespace, growing."""
    seen: list[KvEvents] = []
    log = await EventLog.open(worker.service.bus)
    subject = worker.service.bus.subjects.kv_events("*", "*")
    await log.follow(
        subject, lambda _subject, data, headers, _seq: seen.append(decode_events(data, headers["Content-Type"]))
    )
    return seen


def replay(batches: list[KvEvents]) -> set[bytes]:
    present: set[bytes] = set()
    expected = 1
    for batch in batches:
        assert batch.first_seq == expected, "no number is left out"
        expected = batch.last_seq + 1
        for event in batch.events:
            match event:
                case Stored(_, keys):
                    present |= set(unpack_keys(keys))
                case Removed(keys):
                    present -= set(unpack_keys(keys))
                case Cleared():
                    present.clear()
    return present


async def test_what_one_worker_writes_through_another_reads_back(stage: Stage) -> None:
    running = await stage.kvbm()
    first, second = await stage.worker("worker-a"), await stage.worker("worker-b")
    attached = await first.attach()
    assert await second.attach() == attached
    assert attached.slot_bytes >= BLOCK_BYTES
    assert await first.offload(["a", "b", "c"]) == 3
    assert await second.offload(["a", "b", "c", "d"]) == 1
    assert await second.onboard(["a", "b", "x"]) == [content("a"), content("b")]
    assert await first.onboard(["c", "d"]) == [content("c"), content("d")]
    metrics, labels = running.service.metrics, {"model": "tiny", "pool": attached.pool_id}
    assert metrics.value("block_hits_total", labels) == 4
    assert metrics.value("block_misses_total", labels) == 1
    assert metrics.value("slots", {**labels, "state": "used"}) == 4
    assert metrics.value("slots", {**labels, "state": "free"}) == attached.slots - 4
    assert metrics.value("leases", labels) == 0
    assert metrics.value("bytes", {"state": "assigned"}) == attached.slots * attached.slot_bytes


async def test_it_is_in_the_directory_with_its_memory_and_rate(stage: Stage) -> None:
    await stage.kvbm()
    worker = await stage.worker("worker-a")
    record = await eventually(lambda: worker.service.directory.get(KVBM_ID))
    assert record is not None
    assert record.kvbm is not None
    assert (record.kvbm.g2_bytes, record.kvbm.onboard_bytes_per_s > 0, record.host_id) == (64 * 1024, True, "host-1")


async def test_events_and_snapshot_tell_the_same(stage: Stage) -> None:
    running = await stage.kvbm(g2_bytes=16 * 1024, pool_share=1.0, snapshot_chunk_keys=3)
    worker = await stage.worker("worker-a")
    attached = await worker.attach()
    assert attached.slots == 16
    seen = await follow(worker)
    for i in range(8):
        await worker.offload([f"{i}-{j}" for j in range(4)])
    await worker.offload(["6-x"], parent="6-3")
    chunks = await worker.snapshot()
    assert len(chunks) == 6
    assert {(c.instance_id, c.incarnation, c.model, c.tier) for c in chunks} == {
        (KVBM_ID, running.service.incarnation, "tiny", "g2")
    }
    told = {k for chunk in chunks for chain in chunk.chains for k in unpack_keys(chain.keys)}
    assert len(told) == 16
    assert key("6-x") in told
    await eventually(lambda: seen and seen[-1].last_seq == chunks[0].kv_seq)
    assert replay(seen) == told
    assert {(batch.tier, batch.block_size, batch.model) for batch in seen} == {("g2", 16, "tiny")}


async def test_models_have_pools_and_numbers_of_their_own_and_one_snapshot(stage: Stage) -> None:
    await stage.kvbm()
    one, two = await stage.worker("worker-a"), await stage.worker("worker-b")
    two.model = "org/other model"
    assert (await one.attach()).pool_id != (await two.attach()).pool_id
    await one.offload(["a"])
    await one.offload(["b"])
    await two.offload(["z"])
    told = {c.model: (c.kv_seq, sum(len(ch.keys) // 16 for ch in c.chains)) for c in await one.snapshot()}
    assert told == {"tiny": (2, 2), "org/other model": (1, 1)}


async def test_a_corrupt_block_is_a_miss_and_is_dropped(stage: Stage) -> None:
    running = await stage.kvbm()
    worker = await stage.worker("worker-a")
    await worker.attach()
    await worker.offload(["a", "b", "c"])
    pinned = await worker.pin(["a", "b", "c"])
    worker.slot(pinned.slots[1].index)[500] ^= 1
    await worker.release(pinned.lease_id)
    assert await worker.onboard(["a", "b", "c"]) == [content("a")]
    assert len((await worker.pin(["a", "b", "c"])).slots) == 1
    assert running.service.metrics.value("blocks_corrupt_total", {"model": "tiny", "pool": worker.pool_id}) == 1


async def test_the_leases_of_a_worker_that_left_end_and_its_reservations_rest(stage: Stage) -> None:
    running = await stage.kvbm()
    labels = {"model": "tiny"}
    async with AsyncExitStack() as alone:
        worker = await alone.enter_async_context(
            by_hand(running.service.settings.nats, running.service.settings.namespace, "worker-a", KVBM_ID)
        )
        await worker.attach()
        labels["pool"] = worker.pool_id
        await worker.offload(["a"])
        await worker.pin(["a"])
        await worker.reserve(["b"], parent="a")
        await eventually(lambda: running.service.directory.get("worker-a"))
        assert running.service.metrics.value("leases", labels) == 2
    metrics = running.service.metrics
    await eventually(lambda: metrics.value("leases", labels) == 0)
    assert metrics.value("slots", {**labels, "state": "quarantined"}) == 1
    assert metrics.value("slots", {**labels, "state": "pinned"}) == 0


async def test_an_expired_lease_is_ended_without_any_request(stage: Stage) -> None:
    running = await stage.kvbm(lease_s=0.05, quarantine_s=0.05)
    worker = await stage.worker("worker-a")
    attached = await worker.attach()
    reserved = await worker.reserve(["a"])
    metrics, labels = running.service.metrics, {"model": "tiny", "pool": worker.pool_id}
    await eventually(lambda: metrics.value("slots", {**labels, "state": "free"}) == attached.slots)
    assert metrics.value("leases_expired_total", labels) == 1
    with pytest.raises(RequestFailed) as caught:
        await worker.commit(reserved.lease_id, [1])
    assert caught.value.code is ErrorCode.GONE


async def test_without_room_attaching_is_refused_with_the_numbers(stage: Stage) -> None:
    await stage.kvbm()
    worker = await stage.worker("worker-a")
    with pytest.raises(RequestFailed) as caught:
        await worker.attach(block_bytes=64 * 1024)
    assert caught.value.code is ErrorCode.OVERLOADED
    assert not caught.value.retryable
    assert caught.value.reply.details["g2_bytes"] == 64 * 1024
    assert stage.files() == []


async def test_wrong_requests_get_typed_refusals(stage: Stage) -> None:
    await stage.kvbm(max_keys_per_request=2, max_leases_per_worker=1)
    worker = await stage.worker("worker-a")
    await worker.attach()
    await worker.offload(["a"])
    await worker.pin(["a"])

    async def code_of(request: Any) -> ErrorCode:
        with pytest.raises(RequestFailed) as caught:
            await request
        return caught.value.code

    assert await code_of(worker.pin(["a"])) is ErrorCode.OVERLOADED
    assert await code_of(worker.pin(["a", "b", "c"])) is ErrorCode.PAYLOAD_TOO_LARGE
    assert await code_of(worker.pin([])) is ErrorCode.INVALID_REQUEST
    assert await code_of(worker.commit("nowhere.1", [])) is ErrorCode.GONE
    assert await code_of(worker.attach(block_size=32)) is ErrorCode.UNSUPPORTED
    await worker.release("nowhere.1")


async def test_a_restart_makes_new_pools_and_leaves_no_files(stage: Stage, namespace: str) -> None:
    async with host("kvbm", stage.settings(), start):
        worker = await stage.worker("worker-a")
        before = await worker.attach()
        await worker.offload(["a"])
        reserved = await worker.reserve(["b"], parent="a")
        assert stage.files() == [f"kvbus-{namespace}-{KVBM_ID}-{before.pool_id}.arena"]
        await worker.release(reserved.lease_id)
    assert stage.files() == []
    await stage.kvbm()
    with pytest.raises(RequestFailed) as caught:
        await worker.pin(["a"])
    assert caught.value.code is ErrorCode.GONE
    after = await worker.attach()
    assert after.pool_id != before.pool_id
    assert await worker.onboard(["a"]) == []


async def test_draining_takes_nothing_new_and_waits_for_the_living_leases(stage: Stage) -> None:
    running = await stage.kvbm()
    worker = await stage.worker("worker-a")
    await worker.attach()
    await worker.offload(["a"])
    names = ["b"]
    reserved = await worker.reserve(names, parent="a")
    control = worker.service.bus.subjects.control(KVBM_ID)
    assert await worker.service.bus.request(control, Drain(), Done, timeout_s=10) == Done()
    await eventually(lambda: running.service.stopping)

    async def refused() -> bool:
        try:
            await worker.release((await worker.pin(["a"])).lease_id)
        except RequestFailed as failure:
            return failure.code is ErrorCode.DRAINING
        return False

    refusing: Callable[[], Any] = refused
    await eventually(refusing)
    await worker.commit(reserved.lease_id, worker.write(names, reserved))
    await eventually(lambda: not stage.files())


async def test_a_pool_without_workers_gives_way_and_the_indexers_are_told(stage: Stage) -> None:
    running = await stage.kvbm(max_pools=1)
    watcher = await stage.worker("worker-w")
    seen = await follow(watcher)
    async with by_hand(
        running.service.settings.nats, running.service.settings.namespace, "worker-a", KVBM_ID
    ) as worker:
        await worker.attach()
        await worker.offload(["a", "b"])
        await eventually(lambda: running.service.directory.get("worker-a"))
        with pytest.raises(RequestFailed):
            await watcher.attach(model="new")
    await eventually(lambda: running.service.directory.get("worker-a") is None)
    await watcher.attach(model="new")
    await eventually(lambda: len(seen) == 2)
    assert replay(seen) == set()
    assert len(stage.files()) == 1
    told = {chunk.model: (chunk.kv_seq, chunk.chains) for chunk in await watcher.snapshot()}
    assert told == {"tiny": (2, ()), "new": (0, ())}


async def test_many_workers_at_once_never_read_a_wrong_block(stage: Stage) -> None:
    running = await stage.kvbm(g2_bytes=24 * 1024, pool_share=1.0)
    workers = [await stage.worker(f"worker-{i}") for i in range(3)]
    for worker in workers:
        await worker.attach()

    async def churn(worker: ByHand, first: int) -> int:
        read = 0
        for i in range(40):
            names = [f"{(first + i) % 9}-{j}" for j in range(5)]
            await worker.offload(names)
            blocks = await worker.onboard(names)
            assert blocks == [content(name) for name in names[: len(blocks)]]
            read += len(blocks)
        return read

    read = await asyncio.gather(*(churn(worker, 3 * i) for i, worker in enumerate(workers)))
    assert all(read)
    (pool,) = app_of(running).pools
    pool.pool.check_integrity()
    assert pool.pool.counters.corrupt == 0
    assert pool.pool.counters.evictions > 0
