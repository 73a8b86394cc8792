"""nats-server killed, wiped, stopped and resumed under a running bus: nothing ends, everything is right again."""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from kvbus_runtime import discovery, jetstream
from kvbus_runtime.bus import Bus, RequestContext, RequestFailed, open_bus
from kvbus_runtime.event_log import EventLog, KvEventPublisher
from kvbus_runtime.nats_server import find_nats_server
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import Cleared, KvEvents, decode_events
from kvbus_wire.message import Message
from kvbus_wire.worker import Cancel, Done

WAIT_S = scaled(30)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as own:
        yield own


@asynccontextmanager
async def buses(server: NatsServer, count: int = 2, **settings: object) -> AsyncIterator[list[Bus]]:
    async with AsyncExitStack() as stack:
        common = CommonSettings(nats=server.url, namespace="n", **settings)  # type: ignore[arg-type]
        yield [await stack.enter_async_context(open_bus(common, name=f"bus-{i}")) for i in range(count)]


def cancel(reason: str = "x") -> Cancel:
    return Cancel(request_id="r", reason=reason)


async def done(message: Message, context: RequestContext) -> Message:
    return Done()


async def lost(bus: Bus) -> None:
    await eventually(lambda: not bus.is_connected, what="the bus is away")


async def test_requests_made_during_an_outage_are_answered_after_it(server: NatsServer) -> None:
    async with buses(server) as (one, two):
        await one.serve("s", [Cancel], done)
        server.kill()
        await lost(two)
        waiting = [asyncio.create_task(two.request("s", cancel(), Done, timeout_s=WAIT_S)) for _ in range(20)]
        await asyncio.sleep(0)
        server.start()
        assert await asyncio.gather(*waiting) == [Done()] * 20


async def test_a_request_in_flight_when_the_server_dies_is_sent_again_and_answered(server: NatsServer) -> None:
    runs = 0
    go = asyncio.Event()

    async def handler(message: Message, context: RequestContext) -> Message:
        nonlocal runs
        runs += 1
        await go.wait()
        return Done()

    async with buses(server) as (one, two):
        await one.serve("s", [Cancel], handler)
        waiting = asyncio.create_task(two.request("s", cancel(), Done, timeout_s=WAIT_S))
        await eventually(lambda: runs == 1)
        server.restart()
        await eventually(
            lambda: one.metrics.value("bus_reconnects_total") and two.metrics.value("bus_reconnects_total")
        )
        await two.flush()
        await one.flush()
        go.set()
        assert await waiting == Done()
        assert runs == 1, "the second delivery meets the first one, which still runs"


async def test_a_request_without_a_bus_fails_as_unavailable_at_its_timeout(server: NatsServer) -> None:
    async with buses(server, 1) as (one,):
        server.kill()
        await lost(one)
        with pytest.raises(RequestFailed) as failure:
            await one.request("s", cancel(), Done, timeout_s=0.2)
        assert failure.value.code is ErrorCode.UNAVAILABLE
        assert failure.value.retryable


async def test_publications_of_an_outage_arrive_after_it_in_order(server: NatsServer) -> None:
    async with buses(server, 1) as (one,):
        got: list[str] = []
        await one.subscribe("s", [Cancel], lambda message: got.append(message.reason))
        server.kill()
        await lost(one)
        for i in range(100):
            await one.publish("s", cancel(str(i)))
        server.start()
        await eventually(lambda: len(got) == 100)
        assert got == [str(i) for i in range(100)]


async def test_the_buffer_of_an_outage_is_bounded_and_drops_the_oldest(server: NatsServer) -> None:
    async with buses(server, 1, outage_buffer_bytes=1000) as (one,):
        got: list[str] = []
        await one.subscribe("s", [Cancel], lambda message: got.append(message.reason))
        server.kill()
        await lost(one)
        for i in range(100):
            await one.publish("s", cancel(f"{i:03d}" + "x" * 97))
        assert one.metrics.value("bus_dropped_total", {"reason": "outage_buffer_full"}) >= 90
        server.start()
        await eventually(lambda: got and got[-1].startswith("099"))
        assert len(got) <= 10


async def test_subscriptions_made_during_an_outage_work_after_it(server: NatsServer) -> None:
    async with buses(server) as (one, two):
        server.kill()
        await lost(one)
        await one.serve("s", [Cancel], done)
        server.start()
        assert await two.request("s", cancel(), Done, timeout_s=WAIT_S) == Done()


async def test_a_server_that_hangs_is_left_and_taken_up_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_runtime.link.PING_INTERVAL_S", 0.2)
    async with buses(server) as (one, two):
        await one.serve("s", [Cancel], done)
        server.pause()
        await lost(one)
        await lost(two)
        server.resume()
        assert await two.request("s", cancel(), Done, timeout_s=WAIT_S) == Done()


async def test_ten_restarts_in_a_row_end_nothing(server: NatsServer) -> None:
    async with buses(server) as (one, two):
        await one.serve("s", [Cancel], done)
        outcomes: list[object] = []
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                try:
                    outcomes.append(await two.request("s", cancel(), Done, timeout_s=WAIT_S))
                except RequestFailed as failure:
                    outcomes.append(failure.code)

        clients = [asyncio.create_task(client()) for _ in range(4)]

        async def more_outcomes() -> None:
            before = len(outcomes)
            await eventually(lambda: len(outcomes) > before + 20, timeout_s=30)

        for i in range(10):
            server.restart(wipe=bool(i % 2))
            await more_outcomes()
        stop.set()
        await asyncio.gather(*clients)
        assert set(outcomes) == {Done()}


async def test_a_smaller_payload_limit_after_a_restart_is_respected(server: NatsServer) -> None:
    async with buses(server) as (one, two):
        await one.serve("s", [Cancel], done)
        message = cancel("x" * 500_000)
        await two.request("s", message, Done, timeout_s=WAIT_S)
        server.kill()
        server.reconfigure(max_payload_bytes=64 << 10)
        server.start()
        await eventually(lambda: two.max_payload < 64 << 10 and one.is_connected)
        with pytest.raises(RequestFailed) as failure:
            await two.request("s", message, Done, timeout_s=WAIT_S)
        assert failure.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert await two.request("s", message, Done, timeout_s=WAIT_S, in_parts=True) == Done()


async def test_parts_that_were_lost_with_the_server_side_are_sent_again(server: NatsServer) -> None:
    async with buses(server) as (one, two):
        first = await one.serve("s", [Cancel], done)
        parts = 0
        requester = two._requester
        original = requester.request_bytes

        async def restart_in_the_middle(subject: str, data: bytes, **fields: object) -> object:
            nonlocal parts, first
            parts += 1
            if parts == 2:
                await first.stop()
                first = await one.serve("s", [Cancel], done)
            return await original(subject, data, **fields)  # type: ignore[arg-type]

        requester.request_bytes = restart_in_the_middle  # type: ignore[assignment,method-assign]
        message = cancel("x" * 3_000_000)
        assert await two.request("s", message, Done, timeout_s=WAIT_S, in_parts=True) == Done()
        assert parts > 4


@pytest.mark.parametrize("wipe", [False, True])
async def test_nobody_is_taken_for_gone_by_a_restart(server: NatsServer, wipe: bool) -> None:
    async with (
        running_service(server.url, "n", name="worker", lease_ttl_s=2) as worker,
        running_service(server.url, "n", name="router", lease_ttl_s=2) as router,
    ):
        await eventually(lambda: all(router.directory.get(s.instance_id) for s in (worker, router)))
        changes: list[str] = []
        router.directory.on_change(lambda record, change: changes.append(f"{record.service} {change}"))
        changes.clear()
        refreshed = worker.metrics.value("lease_refreshes_total", {"outcome": "ok"})
        server.restart(wipe=wipe)
        stream = f"KV_{worker.bus.subjects.instances_bucket}"
        subject = discovery._subject(worker.bus, worker.instance_id)

        async def registered_again() -> bool:
            if not router.bus.is_connected:
                return False
            try:
                found = await jetstream.last_message(router.bus, stream, subject)
            except (RequestFailed, jetstream.JetStreamRefused):
                return False
            return found is not None and not found.is_marker

        await eventually(registered_again, timeout_s=30)  # type: ignore[arg-type]
        await eventually(
            lambda: worker.metrics.value("lease_refreshes_total", {"outcome": "ok"}) > refreshed + 5, timeout_s=30
        )
        assert changes == []
        assert router.directory.get(worker.instance_id) is not None


async def test_who_dies_during_an_outage_is_gone_one_lease_after_it(server: NatsServer) -> None:
    async with running_service(server.url, "n", name="router", lease_ttl_s=2) as router:
        async with running_service(server.url, "n", name="worker", lease_ttl_s=2) as worker:
            await eventually(lambda: all(router.directory.get(s.instance_id) for s in (worker, router)))
            server.kill()
            await lost(worker.bus)
            await lost(router.bus)
        assert router.directory.get(worker.instance_id) is not None
        server.start()
        await eventually(lambda: router.directory.get(worker.instance_id) is None, timeout_s=30)
        assert len(router.directory.instances("router")) == 1


async def test_a_long_outage_drops_nobody(server: NatsServer) -> None:
    async with (
        running_service(server.url, "n", name="worker", lease_ttl_s=2) as worker,
        running_service(server.url, "n", name="router", lease_ttl_s=2) as router,
    ):
        await eventually(lambda: all(router.directory.get(s.instance_id) for s in (worker, router)))
        changes: list[str] = []
        router.directory.on_change(lambda record, change: changes.append(f"{record.service} {change}"))
        changes.clear()
        server.kill()
        await lost(router.bus)
        await asyncio.sleep(3.0)  # longer than the lease
        assert changes == []
        server.start()
        await eventually(lambda: router.bus.is_connected and worker.bus.is_connected)
        refreshed = worker.metrics.value("lease_refreshes_total", {"outcome": "ok"})
        await eventually(
            lambda: worker.metrics.value("lease_refreshes_total", {"outcome": "ok"}) > refreshed + 5, timeout_s=30
        )
        assert changes == []


def into(batches: list[KvEvents]) -> Callable[[str, bytes, Mapping[str, str], int], None]:
    def handler(subject: str, data: bytes, headers: Mapping[str, str], seq: int) -> None:
        batches.append(decode_events(data, headers["Content-Type"]))

    return handler


def numbers(batches: list[KvEvents]) -> list[int]:
    return [n for batch in batches for n in range(batch.first_seq, batch.last_seq + 1)]


async def test_events_emitted_over_restarts_are_all_stored_once_in_order(server: NatsServer) -> None:
    async with running_service(server.url, "n") as service:
        batches: list[KvEvents] = []
        await (await EventLog.open(service.bus)).follow(service.bus.subjects.kv_events("*", "*"), into(batches))
        publisher = KvEventPublisher(service, "m", "g1", 16)
        for _ in range(4):
            for _ in range(50):
                publisher.emit([Cleared()])
                await asyncio.sleep(0)
            server.restart()
            publisher.emit([Cleared()] * 50)
        async with asyncio.timeout(WAIT_S):
            await publisher.flush()
        await eventually(lambda: len(numbers(batches)) >= 400, timeout_s=30)
        assert numbers(batches) == list(range(1, 401))


async def test_followers_read_a_stream_that_was_lost_and_made_again_from_its_beginning(server: NatsServer) -> None:
    async with running_service(server.url, "n") as service:
        everything: list[KvEvents] = []
        new: list[KvEvents] = []
        log = await EventLog.open(service.bus)
        subject = service.bus.subjects.kv_events("*", "*")
        publisher = KvEventPublisher(service, "m", "g1", 16)
        publisher.emit([Cleared()] * 3)
        await publisher.flush()
        await log.follow(subject, into(everything))
        await log.follow(subject, into(new), from_seq=0)
        publisher.emit([Cleared()])
        await eventually(lambda: numbers(new) == [4] and numbers(everything) == [1, 2, 3, 4])
        for first in (5, 7):
            server.restart(wipe=True)
            await lost_and_found(service.bus)
            publisher.emit([Cleared()] * 2)
            async with asyncio.timeout(WAIT_S):
                await publisher.flush()
            await ends_with(everything, [first, first + 1])
            await ends_with(new, [first, first + 1])
        assert numbers(everything) == list(range(1, 9))


async def ends_with(batches: list[KvEvents], last: list[int]) -> None:
    await eventually(lambda: numbers(batches)[-len(last) :] == last, timeout_s=30)


async def lost_and_found(bus: Bus) -> None:
    before = bus.metrics.value("bus_reconnects_total")
    await eventually(lambda: bus.metrics.value("bus_reconnects_total") > before or bus.is_connected, timeout_s=30)


async def test_a_stream_that_somebody_deletes_is_made_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_runtime.ordered.HEARTBEAT_S", 0.2)
    monkeypatch.setattr("kvbus_runtime.ordered.SILENCE_S", 0.5)
    async with running_service(server.url, "n") as service:
        batches: list[KvEvents] = []
        await (await EventLog.open(service.bus)).follow(service.bus.subjects.kv_events("*", "*"), into(batches))
        publisher = KvEventPublisher(service, "m", "g1", 16)
        publisher.emit([Cleared()])
        await eventually(lambda: numbers(batches) == [1])
        await jetstream.call(service.bus, f"STREAM.DELETE.{service.bus.subjects.kv_stream}")
        publisher.emit([Cleared()])
        async with asyncio.timeout(WAIT_S):
            await publisher.flush()
        await eventually(lambda: numbers(batches) == [1, 2], timeout_s=30)


async def test_a_consumer_that_vanishes_is_made_again_without_a_gap(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_runtime.ordered.HEARTBEAT_S", 0.2)
    monkeypatch.setattr("kvbus_runtime.ordered.SILENCE_S", 0.5)
    async with running_service(server.url, "n") as service:
        bus = service.bus
        batches: list[KvEvents] = []
        await (await EventLog.open(bus)).follow(bus.subjects.kv_events("*", "*"), into(batches))
        publisher = KvEventPublisher(service, "m", "g1", 16)
        for i in range(3):
            publisher.emit([Cleared()])
            await ends_with(batches, list(range(1, i + 2)))
            assert len(numbers(batches)) == i + 1
            listed = await jetstream.call(bus, f"CONSUMER.NAMES.{bus.subjects.kv_stream}")
            for name in msgspec.json.decode(listed)["consumers"]:
                await jetstream.call(bus, f"CONSUMER.DELETE.{bus.subjects.kv_stream}.{name}")
        publisher.emit([Cleared()])
        await eventually(lambda: numbers(batches) == [1, 2, 3, 4], timeout_s=30)


async def test_kept_objects_are_put_again_when_the_bus_has_lost_them(server: NatsServer) -> None:
    async with buses(server, 1) as (one,):
        data = bytes(300_000)
        name = hashlib.sha256(data).hexdigest()
        await ObjectStore(one).put(name, data, keep=True)
        server.restart(wipe=True)

        async def there() -> bool:
            try:
                return await ObjectStore(one).get(name) == data
            except Exception:
                return False

        await eventually(there, timeout_s=30)  # type: ignore[arg-type]


async def test_a_server_without_jetstream_is_waited_for(server: NatsServer) -> None:
    port = server.url.rpartition(":")[2]
    server.kill()
    binary = str(find_nats_server())
    with subprocess.Popen([binary, "-a", "127.0.0.1", "-p", port], stderr=subprocess.DEVNULL) as plain:  # noqa: ASYNC220
        async with buses(server, 1) as (one,):
            waiting = asyncio.create_task(discovery.ensure_bucket_patiently(one))
            asked = 0
            original = one.request_bytes

            async def count(*arguments: object, **fields: object) -> object:
                nonlocal asked
                asked += 1
                return await original(*arguments, **fields)  # type: ignore[arg-type]

            one.request_bytes = count  # type: ignore[assignment,method-assign]
            await eventually(lambda: asked >= 2)
            assert not waiting.done()
            plain.terminate()
            plain.wait()
            server.start()
            async with asyncio.timeout(WAIT_S):
                await waiting
