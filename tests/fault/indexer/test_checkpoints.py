"""An indexer starts from what was saved last, if that is whole and the events behind it are there; else as if nothing had been."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from kvbus_indexer.app import IndexerApp, start
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import ObjectFailed, RequestFailed
from kvbus_runtime.object_bucket import ObjectBucket
from kvbus_runtime.service import RunningService, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.instances import FakeInstance, block_keys, fake_kvbm, fake_worker
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import DigestIndex, IndexDigest, IndexQuery, IndexReply

MODEL = "m"
BLOCKS = 40_000
"""More than two chunks of the object store."""


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """A server of its own, to be disturbed."""
    with NatsServer() as server:
        yield server


def common(server: NatsServer, name: str) -> CommonSettings:
    return CommonSettings(nats=server.url, instance_id=name, health_port=-1, lease_ttl_s=60)


def settings(server: NatsServer, name: str = "indexer", **fields: Any) -> IndexerSettings:
    """Nothing is saved but by `save`."""
    fields = {"checkpoint_interval_s": 3600.0, "lag_s": 0.1, **fields}
    return IndexerSettings(nats=server.url, instance_id=name, health_port=-1, **fields)


def app(running: RunningService[IndexerSettings]) -> IndexerApp:
    assert isinstance(running.app, IndexerApp)
    return running.app


def count_of(running: RunningService[IndexerSettings], what: str) -> float:
    return running.service.metrics.value("checkpoints_total", {"what": what})


def bucket(worker: FakeInstance) -> ObjectBucket:
    bus = worker.service.bus
    return ObjectBucket(bus, bus.subjects.checkpoints_bucket, max_bytes=64 << 20, store_bytes=192 << 20)


async def depth(asker: FakeInstance, *numbers: int) -> dict[str, int]:
    bus = asker.service.bus
    query = IndexQuery(model=MODEL, keys=block_keys(*numbers))
    reply: IndexReply = await bus.request(bus.subjects.index_query(MODEL), query, IndexReply, timeout_s=5.0)
    return {match.instance_id: match.depth for match in reply.matches}


async def digest(asker: FakeInstance, indexer: str) -> str:
    bus = asker.service.bus
    told: IndexDigest = await bus.request(
        bus.subjects.indexer_control(indexer), DigestIndex(), IndexDigest, timeout_s=5.0
    )
    return told.digest


async def entries_are(running: RunningService[IndexerSettings], count: int) -> None:
    catalog = app(running).catalog
    await eventually(lambda: catalog.content.entries == count, what=f"{count} entries")
    catalog.check_integrity()


async def test_a_restart_is_the_saved_content_and_the_events_behind_it(server: NatsServer) -> None:
    async with (
        fake_worker(common(server, "w1"), MODEL) as worker,
        fake_kvbm(common(server, "k1"), MODEL) as kvbm,
    ):
        async with host("indexer", settings(server), start) as first:
            await worker.store(1, 2)
            await kvbm.store(1, 2, 3)
            await entries_are(first, 5)
            await app(first).checkpoints.save()
            assert count_of(first, "saved") == 1
        await worker.store(3, parent=2)
        await kvbm.remove(3)
        asked = worker.snapshots_taken, kvbm.snapshots_taken
        async with host("indexer", settings(server), start) as second:
            assert count_of(second, "restored") == 1
            assert await depth(worker, 1, 2, 3) == {"w1": 3, "k1": 2}
            assert (worker.snapshots_taken, kvbm.snapshots_taken) == asked, "nobody had to be asked"
            # The same without what was saved, from the stream alone.
            async with host("indexer", settings(server, "other", checkpoint_interval_s=0.0), start):
                assert await digest(worker, "indexer") == await digest(worker, "other")


async def test_a_writer_that_dies_at_any_message_leaves_the_older_checkpoint_usable(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        fake_worker(common(server, "w1"), MODEL) as worker,
        host("indexer", settings(server), start) as running,
    ):
        await worker.store(1)
        await entries_are(running, 1)
        checkpoints = app(running).checkpoints
        await checkpoints.save()
        (older,) = await bucket(worker).newest()
        await worker.store(*range(10, 10 + BLOCKS))
        await entries_are(running, 1 + BLOCKS)
        publish = jetstream.publish
        for allowed in range(10):
            sent = 0

            def dying(bus: Bus, subject: str, *arguments: Any, **options: Any) -> Awaitable[jetstream.PubAck]:
                nonlocal sent
                if subject.startswith("$O."):
                    sent += 1
                    if sent > allowed:  # noqa: B023
                        raise RequestFailed.of(ErrorCode.UNAVAILABLE, "the writer is dead")
                return publish(bus, subject, *arguments, **options)

            monkeypatch.setattr(jetstream, "publish", dying)
            try:
                await checkpoints.save()
                break
            except RequestFailed:
                monkeypatch.setattr(jetstream, "publish", publish)
                assert await bucket(worker).newest() == [older]
                assert await bucket(worker).get(older.name)
        monkeypatch.setattr(jetstream, "publish", publish)
        assert allowed == 4, "three chunks and what describes them"
        newest = await bucket(worker).newest()
        assert len(newest) == 2
        assert newest[1] == older
    async with fake_worker(common(server, "w1"), MODEL) as again, host("indexer", settings(server), start) as second:
        # It has restarted: nothing of what was saved holds.
        assert count_of(second, "restored") == 1
        assert app(second).catalog.content.entries == 0
        assert await depth(again, 1) == {}


async def test_an_indexer_that_is_killed_while_it_saves_all_the_time_starts_again_with_everything(
    server: NatsServer,
) -> None:
    arguments = ["--nats", server.url, "--lag-s", "0.1", "--checkpoint-interval-s", "0.001"]
    async with fake_worker(common(server, "w1"), MODEL) as worker:
        await worker.store(*range(1, BLOCKS))
        for number in range(2):
            with ServiceProcess("kvbus_indexer", arguments) as process:
                await asyncio.to_thread(process.wait_ready)
                assert bool(process.event("checkpoint_restored")) == bool(number)
                before = await bucket(worker).newest()

                async def saved_once_more(before: list[Any] = before) -> bool:
                    await worker.store(BLOCKS + worker.seq)
                    return await bucket(worker).newest() != before

                await eventually(saved_once_more)  # type: ignore[arg-type]
                process.kill()
        async with host("indexer", settings(server), start) as running:
            assert count_of(running, "restored") == 1
            await entries_are(running, len(worker.parents))
            assert worker.snapshots_taken == 0


async def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_is_used(server: NatsServer) -> None:
    async with fake_worker(common(server, "w1"), MODEL) as worker:
        async with host("indexer", settings(server), start) as first:
            for number in (1, 2):
                await worker.store(number)
                await entries_are(first, number)
                await app(first).checkpoints.save()
        newest, _ = await bucket(worker).newest()
        bus = worker.service.bus
        name = bus.subjects.checkpoints_bucket
        await jetstream.call(bus, f"STREAM.PURGE.OBJ_{name}", {"filter": f"$O.{name}.C.{newest.nuid}"})
        await jetstream.publish(bus, f"$O.{name}.C.{newest.nuid}", b"x" * newest.size, {})
        with pytest.raises(ObjectFailed):
            await bucket(worker).get(newest.name)
        async with host("indexer", settings(server), start) as second:
            assert (count_of(second, "unusable"), count_of(second, "restored")) == (1, 1)
            await entries_are(second, 2)


@pytest.mark.parametrize("what", ["purged", "lost"])
async def test_without_all_the_events_behind_it_a_checkpoint_is_worth_nothing(server: NatsServer, what: str) -> None:
    async with (
        fake_worker(common(server, "w1"), MODEL) as worker,
        fake_kvbm(common(server, "k1"), MODEL) as kvbm,
    ):
        async with host("indexer", settings(server), start) as first:
            await worker.store(1, 2)
            await kvbm.store(1, 2, 3)
            await entries_are(first, 5)
            await app(first).checkpoints.save()
        await kvbm.remove(3)
        await worker.clear()
        bus = worker.service.bus
        operation = "PURGE" if what == "purged" else "DELETE"
        await jetstream.call(bus, f"STREAM.{operation}.{bus.subjects.kv_stream}")
        async with host("indexer", settings(server), start) as second:
            assert (count_of(second, "not_in_stream"), count_of(second, "restored")) == (what == "purged", 0)
            await entries_are(second, 2)
            assert await depth(worker, 1, 2, 3) == {"k1": 2}


async def test_replicas_save_in_turn_and_keep_so_many(server: NatsServer) -> None:
    async with (
        fake_worker(common(server, "w1"), MODEL) as worker,
        host("indexer", settings(server, "i1"), start) as one,
        host("indexer", settings(server, "i2"), start) as other,
    ):
        for number in range(1, 5):
            await worker.store(number)
            await entries_are(one, number)
            await entries_are(other, number)
            await app(one).checkpoints.save()
            await app(other).checkpoints.save()
        assert (count_of(one, "saved"), count_of(one, "saved_by_other")) == (4, 0)
        assert (count_of(other, "saved"), count_of(other, "saved_by_other")) == (0, 4)
        assert len(await bucket(worker).newest()) == 2
        await app(one).checkpoints.save()
        assert count_of(one, "saved") == 4, "nothing has changed"
        assert await digest(worker, "i1") == await digest(worker, "i2")
        assert app(other).checkpoints.age_s is not None


async def test_a_checkpoint_above_its_limit_is_not_written(server: NatsServer) -> None:
    # The header takes some 100 bytes, the feed about 150 and 8 per block.
    async with (
        fake_worker(common(server, "w1"), MODEL) as worker,
        host("indexer", settings(server, checkpoint_max_bytes=4096), start) as running,
    ):
        await worker.store(*range(1, 400))
        await entries_are(running, 399)
        await app(running).checkpoints.save()
        await worker.store(*range(400, 600), parent=399)
        await entries_are(running, 599)
        with pytest.raises(ObjectFailed) as failure:
            await app(running).checkpoints.save()
        assert failure.value.reason == "too_large"
        assert len(await bucket(worker).newest()) == 1
