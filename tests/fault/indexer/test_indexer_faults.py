"""The index becomes right again by itself, whatever happens to the bus, to workers or to the indexer."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvbus_indexer.app import IndexerApp, start
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime import jetstream
from kvbus_runtime.bus import RequestFailed
from kvbus_runtime.service import RunningService, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.instances import FakeInstance, block_keys, fake_kvbm, fake_worker
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.proxy import TcpProxy
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.indexer import IndexQuery, IndexReply

MODEL = "m"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """A server of its own, to be disturbed."""
    with NatsServer() as server:
        yield server


def common(server: NatsServer, name: str) -> CommonSettings:
    return CommonSettings(nats=server.url, instance_id=name, health_port=-1, lease_ttl_s=round(scaled(2)))


def indexer_settings(server: NatsServer, **fields: Any) -> IndexerSettings:
    return IndexerSettings(nats=server.url, instance_id="indexer", health_port=-1, lag_s=0.1, **fields)


async def expect(
    asker: FakeInstance, numbers: tuple[int, ...], expected: dict[str, int], *, reports: bool = False
) -> None:
    """``reports``: the asker reports its load now and then, as workers do."""
    bus = asker.service.bus

    async def look() -> bool:
        if reports:
            await asker.report_load()
        query = IndexQuery(model=MODEL, keys=block_keys(*numbers))
        try:
            reply: IndexReply = await bus.request(bus.subjects.index_query(MODEL), query, IndexReply, timeout_s=1.0)
        except RequestFailed:
            return False
        return {match.instance_id: match.depth for match in reply.matches} == expected

    await eventually(look, timeout_s=30.0, what=f"depths of {numbers} being {expected}")  # type: ignore[arg-type]


def app(running: RunningService[IndexerSettings]) -> IndexerApp:
    assert isinstance(running.app, IndexerApp)
    return running.app


@pytest.mark.parametrize("wipe", [False, True], ids=["data stays", "data is lost"])
async def test_a_bus_restart_loses_nothing_for_long(server: NatsServer, wipe: bool) -> None:
    async with (
        host("indexer", indexer_settings(server), start) as running,
        fake_worker(common(server, "w1"), MODEL) as worker,
        fake_kvbm(common(server, "k1"), MODEL) as kvbm,
    ):
        await worker.store(1, 2)
        await kvbm.store(1, 2, 3)
        await expect(worker, (1, 2, 3, 4), {"w1": 2, "k1": 3})
        server.restart(wipe=wipe)
        # What went wrong meanwhile: the worker's report tells of its lost event, the kvbm is asked because it sends no reports.
        await worker.store(3, parent=2, lost=True)
        await kvbm.remove(3, lost=True)
        await expect(worker, (1, 2, 3, 4), {"w1": 3, "k1": 2}, reports=True)
        await worker.store(4, parent=3)
        await expect(worker, (1, 2, 3, 4), {"w1": 4, "k1": 2})
        app(running).catalog.check_integrity()
        assert running.service.health.ready


async def test_a_frozen_bus_is_an_outage_and_no_more(server: NatsServer) -> None:
    async with (
        host("indexer", indexer_settings(server), start),
        fake_worker(common(server, "w1"), MODEL) as worker,
    ):
        await worker.store(1)
        await expect(worker, (1,), {"w1": 1})
        server.pause()
        server.resume()
        await worker.store(2, parent=1)
        await expect(worker, (1, 2), {"w1": 2})


async def test_snapshots_that_fail_are_tried_again_until_they_succeed(server: NatsServer) -> None:
    settings = indexer_settings(server, repair_backoff_s=0.02, repair_backoff_max_s=0.1, repair_give_up=3)
    async with host("indexer", settings, start) as running, fake_worker(common(server, "w1"), MODEL) as worker:
        await worker.store(1)
        await expect(worker, (1,), {"w1": 1})
        worker.answers_snapshots = False
        await worker.store(2, parent=1, lost=True)
        await worker.store(3, parent=2)
        metrics = running.service.metrics
        failed = {"way": "snapshot", "reason": "gap", "outcome": "unavailable"}
        await eventually(lambda: metrics.value("repairs_total", failed) >= 3)
        # What is known of it is too old to be trusted by now.
        await expect(worker, (1, 2, 3), {})
        worker.answers_snapshots = True
        await expect(worker, (1, 2, 3), {"w1": 3})


async def test_a_worker_that_was_killed_leaves_no_entry_when_its_lease_is_over(server: NatsServer) -> None:
    async with (
        host("indexer", indexer_settings(server), start),
        fake_worker(common(server, "w1"), MODEL) as asker,
        fake_worker(common(server, "w2"), MODEL) as dying,
    ):
        await dying.store(1, 2)
        await expect(asker, (1, 2), {"w2": 2})
        # As after SIGKILL: nobody refreshes the lease, and nobody takes leave.
        registration = dying.service._registration
        assert registration._task is not None
        registration._task.cancel()
        await expect(asker, (1, 2), {})


async def test_an_indexer_that_was_killed_knows_everything_again_after_its_restart(server: NatsServer) -> None:
    arguments = ["--nats", server.url, "--lag-s", "0.1"]
    async with fake_worker(common(server, "w1"), MODEL) as worker:
        with ServiceProcess("kvbus_indexer", arguments) as first:
            first.wait_ready()
            await worker.store(1, 2)
            await expect(worker, (1, 2), {"w1": 2})
            first.kill()
        await worker.store(3, parent=2)
        await worker.remove(3)
        await worker.store(4, parent=2, lost=True)
        with ServiceProcess("kvbus_indexer", arguments) as second:
            second.wait_ready()
            await expect(worker, (1, 2, 4), {"w1": 3}, reports=True)
            await expect(worker, (1, 2, 3), {"w1": 2})


async def test_events_that_lie_in_the_stream_in_the_wrong_order_need_no_snapshot(server: NatsServer) -> None:
    async with fake_worker(common(server, "w1"), MODEL) as worker:
        await worker.store(1)
        worker.is_holding_back = True
        await worker.store(2, parent=1)
        await worker.store(3, parent=2)
        await worker.release()
        async with host("indexer", indexer_settings(server), start) as running:
            await expect(worker, (1, 2, 3), {"w1": 3})
            assert worker.snapshots_taken == 0
            read_again = {"way": "replay", "reason": "gap", "outcome": "done"}
            assert running.service.metrics.value("repairs_total", read_again) == 1
            app(running).catalog.check_integrity()


async def test_a_worker_that_is_cut_off_and_comes_back_leaves_no_ghost(server: NatsServer) -> None:
    async with (
        TcpProxy(server.url) as between,
        host("indexer", indexer_settings(server), start),
        fake_worker(common(server, "w1"), MODEL) as asker,
        fake_worker(msgspec.structs.replace(common(server, "w2"), nats=between.url), MODEL) as cut_off,
    ):
        await cut_off.store(1, 2)
        await expect(asker, (1, 2), {"w2": 2})
        await between.cut()
        await expect(asker, (1, 2), {})
        await cut_off.remove(2, lost=True)
        await cut_off.store(3, parent=1, lost=True)
        await between.heal()
        await expect(asker, (1, 3), {"w2": 2})
        await expect(asker, (1, 2), {"w2": 1})


async def test_a_worker_whose_clock_went_back_before_it_restarted_is_followed_all_the_same(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        host("indexer", indexer_settings(server), start),
        fake_worker(common(server, "w1"), MODEL) as asker,
    ):
        now_ns = time.time_ns
        with monkeypatch.context() as clock:
            clock.setattr(time, "time_ns", lambda: now_ns() + 3600 * 1_000_000_000)
            ahead = fake_worker(common(server, "w2"), MODEL)
            before = await ahead.__aenter__()
        await before.store(1, 2)
        await expect(asker, (1, 2), {"w2": 2})
        await ahead.__aexit__(None, None, None)
        async with fake_worker(common(server, "w2"), MODEL) as after:
            assert after.service.incarnation < before.service.incarnation
            await after.store(1)
            await after.store(3, parent=1)
            await expect(asker, (1, 3), {"w2": 2})
            await expect(asker, (1, 2), {"w2": 1})


async def test_what_was_purged_while_the_indexer_was_away_is_made_up_for(server: NatsServer) -> None:
    async with (
        TcpProxy(server.url) as between,
        host("indexer", msgspec.structs.replace(indexer_settings(server), nats=between.url), start),
        fake_worker(common(server, "w1"), MODEL) as worker,
        fake_kvbm(common(server, "k1"), MODEL) as kvbm,
    ):
        await worker.store(1, 2)
        await kvbm.store(1, 2, 3)
        await expect(worker, (1, 2, 3), {"w1": 2, "k1": 3})
        await between.cut()
        await worker.remove(2)
        await kvbm.remove(3)
        bus = worker.service.bus
        await jetstream.call(bus, f"STREAM.PURGE.{bus.subjects.kv_stream}")
        await between.heal()
        await expect(worker, (1, 2, 3), {"w1": 1, "k1": 2}, reports=True)
