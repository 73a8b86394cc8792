"""The stream of KV events on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import pairwise

import pytest

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.event_log import EventLog, KvEventPublisher, OutboxLimits
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored, decode_events

KEY = bytes(16)


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="one") as one:
        yield one


def collector(into: list[tuple[int, bytes]]) -> Callable[[str, bytes, Mapping[str, str], int], None]:
    return lambda subject, data, headers, seq: into.append((seq, data))


async def append(log: EventLog, bus: Bus, *texts: str, worker: str = "w") -> list[int]:
    subject = bus.subjects.kv_events("m", worker)
    return [await log.append(subject, text.encode(), msg_id=f"{worker}-{text}", content_type="x") for text in texts]


async def test_followers_read_from_the_beginning_from_a_number_or_only_what_is_new(bus: Bus) -> None:
    log = await EventLog.open(bus)
    assert await append(log, bus, "a", "b", "c") == [1, 2, 3]
    everything: list[tuple[int, bytes]] = []
    later: list[tuple[int, bytes]] = []
    new: list[tuple[int, bytes]] = []
    subject = bus.subjects.kv_events("*", "*")
    caught_up = asyncio.Event()
    await log.follow(subject, collector(everything), on_caught_up=caught_up.set)
    await log.follow(subject, collector(later), from_seq=3)
    await log.follow(subject, collector(new), from_seq=0)
    async with asyncio.timeout(scaled(10)):
        await caught_up.wait()
    assert everything == [(1, b"a"), (2, b"b"), (3, b"c")]
    await append(log, bus, "d")
    await eventually(lambda: new == [(4, b"d")])
    await eventually(lambda: later == [(3, b"c"), (4, b"d")])
    await eventually(lambda: everything[3:] == [(4, b"d")])


async def test_an_empty_stream_is_caught_up_at_once(bus: Bus) -> None:
    log = await EventLog.open(bus)
    caught_up = asyncio.Event()
    await log.follow(bus.subjects.kv_events("*", "*"), collector([]), on_caught_up=caught_up.set)
    async with asyncio.timeout(scaled(10)):
        await caught_up.wait()


async def test_a_stopped_follower_hears_nothing_more(bus: Bus) -> None:
    log = await EventLog.open(bus)
    got: list[tuple[int, bytes]] = []
    follower = await log.follow(bus.subjects.kv_events("*", "*"), collector(got))
    await follower.stop()
    await append(log, bus, "a")
    await bus.flush()
    assert got == []


async def test_the_same_message_id_is_stored_once(bus: Bus) -> None:
    log = await EventLog.open(bus)
    assert await append(log, bus, "a", "a", "b") == [1, 1, 2]
    assert await log.last_seq() == 2


async def test_a_range_holds_one_subject_between_two_numbers(bus: Bus) -> None:
    log = await EventLog.open(bus)
    await append(log, bus, "a")
    await append(log, bus, "b", worker="v")
    await append(log, bus, "c", "d")
    subject = bus.subjects.kv_events("m", "w")
    found = await log.range(subject, 1, 3)
    assert [(one.seq, one.data) for one in found] == [(1, b"a"), (3, b"c")]
    assert await log.range(subject, 5, 9) == []


async def test_the_stream_is_bounded_by_bytes(nats_server: NatsServer, namespace: str) -> None:
    settings = CommonSettings(nats=nats_server.url, namespace=namespace, kv_stream_max_bytes=100_000)
    async with open_bus(settings, name="one") as small:
        log = await EventLog.open(small)
        subject = small.subjects.kv_events("m", "w")
        for i in range(30):
            await log.append(subject, bytes(10_000), msg_id=str(i), content_type="x")
        assert 1 <= len(await log.range(subject, 1, 30)) <= 10
        assert await log.last_seq() == 30


async def test_opening_with_other_limits_updates_the_stream(nats_server: NatsServer, namespace: str) -> None:
    for limit in (1 << 20, 2 << 20):
        settings = CommonSettings(nats=nats_server.url, namespace=namespace, kv_stream_max_bytes=limit)
        async with open_bus(settings, name="one") as one:
            log = await EventLog.open(one)
            await append(log, one, f"limit-{limit}")
    async with open_bus(settings, name="one") as one:
        assert len(await EventLog(one).range(one.subjects.kv_events("*", "*"), 1, 9)) == 2


@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("encoding", ["msgpack", "json"])
async def test_events_are_numbered_and_arrive_in_order(nats_server: NatsServer, namespace: str, encoding: str) -> None:
    async with running_service(nats_server.url, namespace, kv_event_encoding=encoding) as service:
        batches = await follow_batches(service.bus)
        publisher = KvEventPublisher(service, "org/m.1", "g1", 32)
        assert publisher.last_seq == 0
        sent: list[KvEvent] = [Stored(b"", KEY), Removed(KEY), Cleared()] * 700
        for i in range(0, len(sent), 7):
            publisher.emit(sent[i : i + 7])
            if i % 490 == 0:
                await asyncio.sleep(0)
        assert publisher.last_seq == len(sent)
        await publisher.flush()
        await eventually(lambda: sum(len(batch.events) for batch in batches) == len(sent))
        assert [event for batch in batches for event in batch.events] == sent
        numbers = [(batch.first_seq, batch.last_seq) for batch in batches]
        assert numbers[0][0] == 1
        assert all(before[1] + 1 == after[0] for before, after in pairwise(numbers))
        first = batches[0]
        assert (first.instance_id, first.incarnation) == (service.instance_id, service.incarnation)
        assert (first.model, first.tier, first.block_size) == ("org/m.1", "g1", 32)
        assert len(batches) < len(sent) / 10
        await publisher.close()


async def follow_batches(bus: Bus) -> list[KvEvents]:
    batches: list[KvEvents] = []

    def handler(subject: str, data: bytes, headers: Mapping[str, str], seq: int) -> None:
        batches.append(decode_events(data, headers["Content-Type"]))

    await (await EventLog.open(bus)).follow(bus.subjects.kv_events("*", "*"), handler)
    return batches


async def test_a_full_outbox_drops_the_oldest_and_the_numbers_show_the_gap(
    nats_server: NatsServer, namespace: str
) -> None:
    async with running_service(nats_server.url, namespace) as service:
        batches = await follow_batches(service.bus)
        publisher = KvEventPublisher(service, "m", "g1", 16, OutboxLimits(events=10))
        publisher.emit([Cleared()] * 25)
        await publisher.flush()
        await eventually(lambda: batches)
        assert [(batch.first_seq, batch.last_seq) for batch in batches] == [(16, 25)]
        assert service.metrics.value("kv_events_dropped_total", {"tier": "g1"}) == 15


async def test_batches_keep_their_limits(nats_server: NatsServer, namespace: str) -> None:
    async with running_service(nats_server.url, namespace) as service:
        batches = await follow_batches(service.bus)
        limits = OutboxLimits(batch_events=4, batch_bytes=10_000)
        publisher = KvEventPublisher(service, "m", "g1", 16, limits)
        publisher.emit([Cleared()] * 6 + [Stored(b"", bytes(8000))] * 2)
        await publisher.flush()
        await eventually(lambda: sum(len(b.events) for b in batches) == 8)
        assert [len(batch.events) for batch in batches] == [4, 3, 1]


async def test_an_event_that_no_message_can_hold_leaves_a_gap(nats_server: NatsServer, namespace: str) -> None:
    async with running_service(nats_server.url, namespace) as service:
        batches = await follow_batches(service.bus)
        publisher = KvEventPublisher(service, "m", "g1", 16)
        publisher.emit([Cleared(), Stored(b"", bytes(2 << 20)), Cleared()])
        await publisher.flush()
        await eventually(lambda: len(batches) == 2)
        assert [batch.first_seq for batch in batches] == [1, 3]


async def test_a_publisher_needs_no_stream_to_be_there_before() -> None:
    with NatsServer() as server:
        async with running_service(server.url, "n") as service:
            publisher = KvEventPublisher(service, "m", "g1", 16)
            publisher.emit([Cleared()])
            async with asyncio.timeout(scaled(10)):
                await publisher.flush()
            assert await EventLog(service.bus).last_seq() == 1


async def test_a_lost_stream_is_made_again_although_somebody_listens_in_on_its_subject(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_runtime.event_log.APPEND_TIMEOUT_S", 0.3)
    log = await EventLog.open(bus)
    await bus.subscribe_bytes(bus.subjects.kv_events("*", "*"), lambda subject, data, headers: None)
    await bus.flush()
    await jetstream.call(bus, f"STREAM.DELETE.{bus.subjects.kv_stream}")
    assert await append(log, bus, "a") == [1]
