from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvbus_indexer.app import IndexerApp, start
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime.bus import RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.service import RunningService, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.instances import FakeInstance, block_key, block_keys, fake_kvbm, fake_worker
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import IndexQuery, IndexReply
from kvbus_wire.kv_events import KvEvents, Stored, encode_events
from kvbus_wire.message import CONTENT_TYPE_JSON

MODEL = "org/tiny-model"

Common = Callable[[str], CommonSettings]


@pytest.fixture
def common(nats_server: NatsServer, namespace: str) -> Common:
    return lambda name: CommonSettings(
        nats=nats_server.url, namespace=namespace, instance_id=name, health_port=-1, lease_ttl_s=round(scaled(2))
    )


class Cluster:
    """An indexer and the instances that it follows."""

    def __init__(self, nats_server: NatsServer, namespace: str, common: Common) -> None:
        self._url = nats_server.url
        self._namespace = namespace
        self._common = common
        self._stack = AsyncExitStack()
        self._indexers = 0

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def indexer(self, **fields: Any) -> RunningService[IndexerSettings]:
        self._indexers += 1
        settings = IndexerSettings(
            nats=self._url,
            namespace=self._namespace,
            instance_id=f"indexer-{self._indexers}",
            health_port=-1,
            **fields,
        )
        return await self._stack.enter_async_context(host("indexer", settings, start))

    async def worker(self, name: str) -> FakeInstance:
        return await self._stack.enter_async_context(fake_worker(self._common(name), MODEL))

    async def kvbm(self, name: str) -> FakeInstance:
        return await self._stack.enter_async_context(fake_kvbm(self._common(name), MODEL))


@pytest.fixture
async def cluster(nats_server: NatsServer, namespace: str, common: Common) -> AsyncIterator[Cluster]:
    async with Cluster(nats_server, namespace, common) as cluster:
        yield cluster


async def depths(asker: FakeInstance, *numbers: int) -> dict[str, int]:
    bus = asker.service.bus
    reply: IndexReply = await bus.request(
        bus.subjects.index_query(MODEL), IndexQuery(model=MODEL, keys=block_keys(*numbers)), IndexReply, timeout_s=5.0
    )
    return {f"{match.instance_id}/{match.tier}": match.depth for match in reply.matches}


async def expect(
    asker: FakeInstance, numbers: tuple[int, ...], expected: dict[str, int], *, reports: bool = False
) -> None:
    """``reports``: the asker reports its load now and then, as workers do."""

    async def look() -> bool:
        if reports:
            await asker.report_load()
        return await depths(asker, *numbers) == expected

    await eventually(look, what=f"depths of {numbers} being {expected}")  # type: ignore[arg-type]


def catalog(running: RunningService[IndexerSettings]) -> IndexerApp:
    assert isinstance(running.app, IndexerApp)
    return running.app


async def entries_are(app: IndexerApp, count: int) -> None:
    await eventually(lambda: app.catalog.content.entries == count)
    app.catalog.check_integrity()


async def test_stored_and_removed_blocks_show_in_the_answers(cluster: Cluster) -> None:
    w1, w2 = await cluster.worker("w1"), await cluster.worker("w2")
    running = await cluster.indexer()
    assert running.service.health.ready
    await w1.store(1, 2, 3)
    await w2.store(1)
    await expect(w1, (1, 2, 3, 4), {"w1/g1": 3, "w2/g1": 1})
    await w1.store(4, parent=3)
    await w1.remove(4, 3)
    await w2.clear()
    await expect(w1, (1, 2, 3, 4), {"w1/g1": 2})
    assert await depths(w1, 9) == {}
    assert running.service.metrics.value("entries") == 2


async def test_a_lower_tier_answers_beside_the_worker(cluster: Cluster) -> None:
    await cluster.indexer()
    worker, kvbm = await cluster.worker("w1"), await cluster.kvbm("k1")
    await kvbm.store(1, 2, 3)
    await worker.store(1)
    await expect(worker, (1, 2, 3), {"w1/g1": 1, "k1/g2": 3})


async def test_a_lost_event_is_made_up_for_by_a_snapshot(cluster: Cluster) -> None:
    running = await cluster.indexer()
    worker = await cluster.worker("w1")
    await worker.store(1)
    await expect(worker, (1,), {"w1/g1": 1})
    await worker.store(2, 3, parent=1, lost=True)
    await worker.store(4, parent=3)
    await expect(worker, (1, 2, 3, 4), {"w1/g1": 4})
    assert running.service.metrics.value("repairs_total", {"way": "snapshot", "reason": "gap", "outcome": "done"}) == 1


async def test_a_lost_last_event_is_noticed_by_a_load_report(cluster: Cluster) -> None:
    await cluster.indexer(lag_s=0.05)
    worker = await cluster.worker("w1")
    await worker.store(1)
    await worker.store(2, parent=1, lost=True)
    await expect(worker, (1, 2), {"w1/g1": 2}, reports=True)


async def test_an_indexer_that_starts_late_reads_the_stream_and_asks_who_is_not_in_it(cluster: Cluster) -> None:
    w1, w2, w3 = [await cluster.worker(name) for name in ("w1", "w2", "w3")]
    await w1.store(1, 2)
    await w2.store(1, 2, lost=True)
    await w3.store(1, lost=True)
    await w3.store(2, parent=1)
    await cluster.indexer()
    await expect(w1, (1, 2), {"w1/g1": 2, "w2/g1": 2, "w3/g1": 2})
    assert (w1.snapshots_taken, w2.snapshots_taken, w3.snapshots_taken) == (0, 1, 1)


async def test_two_indexers_know_the_same(cluster: Cluster) -> None:
    first = await cluster.indexer()
    worker = await cluster.worker("w1")
    await worker.store(1, 2, 3)
    second = await cluster.indexer()
    for running in (first, second):
        await entries_are(catalog(running), 3)
    await first.app.drain("test")
    assert await depths(worker, 1, 2, 3) == {"w1/g1": 3}


async def test_a_worker_that_is_gone_is_in_no_answer(cluster: Cluster, common: Common) -> None:
    await cluster.indexer()
    asker = await cluster.worker("w1")
    async with fake_worker(common("w2"), MODEL) as leaving:
        await leaving.store(1, 2)
        await expect(asker, (1, 2), {"w2/g1": 2})
    await expect(asker, (1, 2), {})


async def test_a_restarted_worker_begins_with_nothing(cluster: Cluster, common: Common) -> None:
    await cluster.indexer()
    asker = await cluster.worker("w1")
    async with fake_worker(common("w2"), MODEL) as before:
        await before.store(1, 2)
        await expect(asker, (1, 2), {"w2/g1": 2})
    async with fake_worker(common("w2"), MODEL) as after:
        await after.store(1)
        await expect(asker, (1, 2), {"w2/g1": 1})


async def test_json_events_are_understood_and_bad_ones_only_counted(cluster: Cluster) -> None:
    running = await cluster.indexer()
    worker = await cluster.worker("w1")
    bus = worker.service.bus
    subject = bus.subjects.kv_events(MODEL, "w1")
    log = EventLog(bus)
    await log.append(subject, b"\xff nonsense", msg_id="bad", content_type=CONTENT_TYPE_JSON)
    batch = KvEvents(
        instance_id="w1",
        incarnation=worker.service.incarnation,
        model=MODEL,
        first_seq=1,
        events=(Stored(b"", block_key(1)), Stored(block_key(1), block_key(2))),
    )
    await log.append(subject, encode_events(batch, as_json=True), msg_id="good", content_type=CONTENT_TYPE_JSON)
    await expect(worker, (1, 2), {"w1/g1": 2})
    assert running.service.metrics.value("event_batches_total", {"outcome": "bad"}) == 1


async def test_bad_questions_are_refused_with_a_reason(cluster: Cluster) -> None:
    running = await cluster.indexer(max_query_keys=2)
    worker = await cluster.worker("w1")
    bus = worker.service.bus
    for subject in (bus.subjects.index_query(MODEL), bus.subjects.indexer_query(running.service.instance_id)):
        for keys, code in [(b"short", ErrorCode.INVALID_REQUEST), (block_keys(1, 2, 3), ErrorCode.PAYLOAD_TOO_LARGE)]:
            with pytest.raises(RequestFailed) as refused:
                await bus.request(subject, IndexQuery(model=MODEL, keys=keys), IndexReply, timeout_s=5.0)
            assert refused.value.code is code
    assert await depths(worker, 1, 2) == {}
    assert await depths(worker) == {}


async def test_a_full_index_leaves_the_newcomer_out_and_says_so(cluster: Cluster) -> None:
    running = await cluster.indexer(max_entries=3, refill_interval_s=0.05)
    w1, w2 = await cluster.worker("w1"), await cluster.worker("w2")
    await w1.store(1, 2, 3)
    await expect(w1, (1, 2, 3), {"w1/g1": 3})
    await w2.store(1, 2)
    metrics = running.service.metrics
    await eventually(lambda: metrics.value("instances_partial") == 1)
    assert metrics.value("blocks_changed_total", {"what": "refused_full"}) == 2
    assert await depths(w1, 1, 2) == {"w1/g1": 2}
    await w1.clear()
    await expect(w1, (1, 2), {"w2/g1": 2})
    await eventually(lambda: metrics.value("instances_partial") == 0)
