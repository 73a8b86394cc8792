"""Request and reply over a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import MagicMock

import nats
import pytest

from kvbus_runtime.bus import Bus, PayloadTooLarge, RequestContext, RequestFailed, open_bus
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Decoder, Message, encode
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.worker import Accepted, Cancel, Done, Generate, NeedTokens

WAIT_S = scaled(10)


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="one") as one:
        yield one


@pytest.fixture
async def other(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="other") as two:
        yield two


def cancel(size: int = 1) -> Cancel:
    return Cancel(request_id="r", reason="x" * size)


async def done(message: Message, context: RequestContext) -> Message:
    return Done()


@pytest.mark.usefixtures("no_blocking")
async def test_a_request_gets_its_reply(bus: Bus, other: Bus) -> None:
    await bus.serve(bus.subjects.control("w"), [Cancel], done)
    assert await other.request(bus.subjects.control("w"), cancel(), Done, timeout_s=WAIT_S) == Done()
    assert bus.metrics.value("requests_served_total", {"request": "Cancel", "outcome": "ok"}) == 1
    assert other.metrics.value("requests_sent_total", {"request": "Cancel", "outcome": "ok"}) == 1


@pytest.mark.parametrize("timeout_ms", ["", "x", "-5", "\N{SUPERSCRIPT TWO}", "9" * 400, "9" * 5000])
async def test_a_timeout_that_is_no_number_of_milliseconds_is_as_good_as_none(
    nats_server: NatsServer, bus: Bus, timeout_ms: str
) -> None:
    await bus.serve("s", [Cancel], done)
    stranger = await nats.connect(nats_server.url)
    try:
        headers = {"Kvbus-Timeout-Ms": timeout_ms}
        reply = await stranger.request("s", encode(cancel()), timeout=WAIT_S, headers=headers)
    finally:
        await stranger.close()
    assert Decoder.of(Done).decode(reply.data) == Done()


async def test_one_of_several_replies_is_told_by_its_type(bus: Bus, other: Bus) -> None:
    async def handler(message: Message, context: RequestContext) -> Message:
        return NeedTokens(request_id="r")

    await bus.serve("s", [Cancel], handler)
    assert isinstance(await other.request("s", cancel(), Accepted, NeedTokens, timeout_s=WAIT_S), NeedTokens)


async def test_a_refusal_comes_back_with_its_fields(bus: Bus, other: Bus) -> None:
    async def refuse(message: Message, context: RequestContext) -> Message:
        raise RequestFailed.of(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", retry_after_s=2.0, param="messages", limit=10
        )

    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], refuse)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=WAIT_S)
    reply = failure.value.reply
    assert (reply.code, reply.retry_after_s, reply.param, reply.details) == (
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        2.0,
        "messages",
        {"limit": 10},
    )
    assert not failure.value.retryable


async def test_a_reply_that_cannot_be_encoded_is_an_internal_error_and_the_subject_lives_on(
    bus: Bus, other: Bus
) -> None:
    async def overflow(message: Message, context: RequestContext) -> Message:
        return Accepted(request_id="r", incarnation=2**64)

    await bus.serve("s", [Cancel], overflow)
    for _ in range(2):
        with pytest.raises(RequestFailed) as failure:
            await other.request("s", cancel(), Accepted, timeout_s=WAIT_S)
        assert failure.value.code is ErrorCode.INTERNAL


async def test_a_crashing_handler_is_an_internal_error_and_the_subject_lives_on(bus: Bus, other: Bus) -> None:
    calls = 0

    async def handler(message: Message, context: RequestContext) -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return Done()

    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], handler)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.INTERNAL
    assert await other.request(subject, cancel(), Done, timeout_s=WAIT_S) == Done()


async def test_a_timeout_error_of_the_handler_itself_is_internal(bus: Bus, other: Bus) -> None:
    async def handler(message: Message, context: RequestContext) -> Message:
        raise TimeoutError

    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], handler)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.INTERNAL


async def test_nobody_there_is_told_at_once(other: Bus) -> None:
    with pytest.raises(RequestFailed) as failure:
        await other.request(other.subjects.control("nobody"), cancel(), Done, timeout_s=600)
    assert failure.value.code is ErrorCode.UNAVAILABLE
    assert failure.value.retryable


async def test_no_reply_in_time_is_a_deadline_and_the_handler_is_cancelled(bus: Bus, other: Bus) -> None:
    cancelled = asyncio.Event()
    deadlines: list[float | None] = []

    async def handler(message: Message, context: RequestContext) -> Message:
        deadlines.append(context.deadline)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Done()

    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], handler)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=0.2)
    assert failure.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert failure.value.retryable
    async with asyncio.timeout(WAIT_S):
        await cancelled.wait()
    assert deadlines[0] is not None


async def test_no_time_left_is_a_deadline_without_asking(other: Bus) -> None:
    with pytest.raises(RequestFailed) as failure:
        await other.request("s", cancel(), Done, timeout_s=0)
    assert failure.value.code is ErrorCode.DEADLINE_EXCEEDED


async def test_a_request_of_another_type_is_refused(bus: Bus, other: Bus) -> None:
    subject = bus.subjects.control("w")
    await bus.serve(subject, [NeedTokens], done)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.INVALID_REQUEST
    reply = await other.request_bytes(subject, b"\xc1", timeout_s=WAIT_S)
    assert b"invalid_request" in reply.data


async def test_an_unexpected_reply_is_an_internal_error(bus: Bus, other: Bus) -> None:
    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], done)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Accepted, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.INTERNAL


async def test_above_max_pending_requests_are_refused_as_overload(bus: Bus, other: Bus) -> None:
    go = asyncio.Event()
    running = 0

    async def handler(message: Message, context: RequestContext) -> Message:
        nonlocal running
        running += 1
        await go.wait()
        return Done()

    subject = bus.subjects.control("w")
    await bus.serve(subject, [Cancel], handler, max_pending=2)
    two = [asyncio.create_task(other.request(subject, cancel(), Done, timeout_s=WAIT_S)) for _ in range(2)]
    await eventually(lambda: running == 2)
    with pytest.raises(RequestFailed) as failure:
        await other.request(subject, cancel(), Done, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.OVERLOADED
    assert failure.value.retryable
    go.set()
    assert await asyncio.gather(*two) == [Done(), Done()]
    assert await other.request(subject, cancel(), Done, timeout_s=WAIT_S) == Done()


async def test_a_queue_group_answers_each_request_once(bus: Bus, other: Bus) -> None:
    served: list[str] = []

    def handler(name: str) -> object:
        async def handle(message: Message, context: RequestContext) -> Message:
            served.append(name)
            return Done()

        return handle

    for name, member in (("one", bus), ("two", other)):
        await member.serve("q", [Cancel], handler(name), queue="g")  # type: ignore[arg-type]
    for _ in range(40):
        await bus.request("q", cancel(), Done, timeout_s=WAIT_S)
    assert len(served) == 40
    assert set(served) == {"one", "two"}


async def test_a_request_that_is_delivered_twice_while_it_runs_runs_once_and_is_answered_twice(
    bus: Bus, other: Bus
) -> None:
    go = asyncio.Event()
    runs = 0

    async def handler(message: Message, context: RequestContext) -> Message:
        nonlocal runs
        runs += 1
        await go.wait()
        return Done()

    await bus.serve("s", [Cancel], handler)
    from kvbus_wire.message import encode

    headers = {"Nats-Msg-Id": "same"}
    twins = [
        asyncio.create_task(other.request_bytes("s", encode(cancel()), timeout_s=WAIT_S, headers=headers))
        for _ in range(2)
    ]
    await eventually(lambda: runs == 1)
    await other.flush()
    await bus.flush()
    go.set()
    assert [reply.data for reply in await asyncio.gather(*twins)] == [encode(Done())] * 2
    assert runs == 1


async def test_stopping_lets_running_handlers_answer_and_takes_no_new_requests(bus: Bus, other: Bus) -> None:
    go = asyncio.Event()
    started = asyncio.Event()

    async def handler(message: Message, context: RequestContext) -> Message:
        started.set()
        await go.wait()
        return Done()

    subscription = await bus.serve("s", [Cancel], handler)
    running = asyncio.create_task(other.request("s", cancel(), Done, timeout_s=WAIT_S))
    await started.wait()
    stopping = asyncio.create_task(subscription.stop())

    async def refused() -> bool:
        try:
            await other.request("s", cancel(), Done, timeout_s=0.5)
        except RequestFailed as failure:
            return failure.code is ErrorCode.UNAVAILABLE
        return False

    await eventually(refused)  # type: ignore[arg-type]
    assert not stopping.done()
    go.set()
    assert await running == Done()
    await stopping


@asynccontextmanager
async def pair(server: NatsServer, namespace: str, **settings: object) -> AsyncIterator[tuple[Bus, Bus]]:
    common = CommonSettings(nats=server.url, namespace=namespace, **settings)  # type: ignore[arg-type]
    async with open_bus(common, name="one") as one, open_bus(common, name="two") as two:
        yield one, two


def prompt(tokens: int) -> Generate:
    return Generate(
        request_id="r",
        model="m",
        frontend_id="f",
        tokens=pack_tokens(range(tokens)),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        deadline_ms=0,
    )


@pytest.mark.parametrize("max_payload", [1 << 20, 256 << 10])
async def test_a_prompt_of_200k_tokens_arrives(namespace: str, max_payload: int) -> None:
    received: list[Generate] = []

    async def handler(message: Generate, context: RequestContext) -> Message:
        received.append(message)
        return Accepted(request_id=message.request_id, incarnation=1)

    with NatsServer(max_payload_bytes=max_payload) as server:
        async with pair(server, namespace) as (one, two):
            await one.serve("s", [Generate], handler)
            reply = await two.request("s", prompt(200_000), Accepted, timeout_s=scaled(30), in_parts=True)
            assert reply == Accepted(request_id="r", incarnation=1)
            assert received == [prompt(200_000)]
            if max_payload < 1 << 20:
                with pytest.raises(RequestFailed) as failure:
                    await two.request("s", prompt(200_000), Accepted, timeout_s=WAIT_S)
                assert failure.value.code is ErrorCode.PAYLOAD_TOO_LARGE
                assert failure.value.reply.details["limit"] == two.max_payload


async def test_a_message_above_the_limit_of_messages_in_parts_is_refused_by_both_sides(
    nats_server: NatsServer, namespace: str
) -> None:
    async with pair(nats_server, namespace, max_message_bytes=2 << 20) as (one, two):
        await one.serve("s", [Generate], done)
        with pytest.raises(RequestFailed) as failure:
            await two.request("s", prompt(600_000), Done, timeout_s=WAIT_S, in_parts=True)
        assert failure.value.code is ErrorCode.PAYLOAD_TOO_LARGE
        common = CommonSettings(nats=nats_server.url, namespace=namespace)
        async with open_bus(common, name="generous") as generous:
            with pytest.raises(RequestFailed) as failure:
                await generous.request("s", prompt(600_000), Done, timeout_s=WAIT_S, in_parts=True)
            assert failure.value.code is ErrorCode.PAYLOAD_TOO_LARGE


@pytest.mark.usefixtures("no_blocking")
async def test_many_large_messages_at_once_all_arrive(nats_server: NatsServer, namespace: str) -> None:
    async with pair(nats_server, namespace) as (one, two):
        await one.serve("s", [Generate], done)
        requests = [two.request("s", prompt(300_000), Done, timeout_s=scaled(60), in_parts=True) for _ in range(8)]
        assert await asyncio.gather(*requests) == [Done()] * 8


async def test_publishing_too_much_is_refused_before_anything_is_sent(bus: Bus, other: Bus) -> None:
    received: list[Cancel] = []
    await other.subscribe("s", [Cancel], received.append)
    with pytest.raises(PayloadTooLarge) as refused:
        await bus.publish("s", cancel(bus.max_payload))
    assert refused.value.limit == bus.max_payload
    overhead = len("r") + 40
    await bus.publish("s", cancel(bus.max_payload - overhead))
    await eventually(lambda: len(received) == 1)
    assert bus.is_connected


async def test_a_reply_that_is_too_large_becomes_an_error_reply(bus: Bus, other: Bus) -> None:
    async def handler(message: Message, context: RequestContext) -> Message:
        return cancel(bus.max_payload)

    await bus.serve("s", [Cancel], handler)
    with pytest.raises(RequestFailed) as failure:
        await other.request("s", cancel(), Cancel, timeout_s=WAIT_S)
    assert failure.value.code is ErrorCode.PAYLOAD_TOO_LARGE


async def test_messages_arrive_in_order_and_bad_ones_are_counted_and_skipped(bus: Bus, other: Bus) -> None:
    received: list[str] = []

    def handler(message: Cancel) -> None:
        if message.reason == "7":
            raise LookupError
        received.append(message.reason)

    subject = bus.subjects.load("w")
    other.log = MagicMock()
    subscription = await other.subscribe(subject, [Cancel], handler)
    for i in range(100):
        await bus.publish(subject, Cancel(request_id="r", reason=str(i)))
        if i in (50, 60, 70):
            await bus.publish_bytes(subject, b"\xc1", content_type="x")
    await eventually(lambda: len(received) == 99)
    assert received == [str(i) for i in range(100) if i != 7]
    assert other.metrics.value("bus_bad_messages_total", {"subject": subject}) == 4
    assert (other.log.warning.call_count, other.log.exception.call_count) == (1, 1), "a flood of them floods no log"
    await subscription.stop()
    await bus.publish(subject, cancel())
    await bus.flush()
    await other.flush()
    assert len(received) == 99


async def test_a_subscriber_that_is_too_slow_is_seen(bus: Bus, other: Bus) -> None:
    received = 0

    def handler(subject: str, data: bytes, headers: object) -> None:
        nonlocal received
        received += 1

    await other.subscribe_bytes("slow", handler, pending_limit_bytes=1000)
    for _ in range(50):
        await bus.publish_bytes("slow", b"x" * 600, content_type="x")
    await eventually(lambda: other.metrics.value("bus_slow_consumer_total", {"subject": "slow"}) + received == 50)
    assert other.metrics.value("bus_slow_consumer_total", {"subject": "slow"}) > 0


@pytest.mark.usefixtures("no_blocking")
async def test_requests_wait_for_nobody_while_thousands_run(bus: Bus, other: Bus) -> None:
    await bus.serve("s", [Cancel], done)
    replies = await asyncio.gather(*(other.request("s", cancel(), Done, timeout_s=scaled(60)) for _ in range(1000)))
    assert replies == [Done()] * 1000


async def test_headers_and_content_type_arrive(bus: Bus, other: Bus) -> None:
    seen: list[tuple[str, bytes, dict[str, str]]] = []
    await other.subscribe_bytes("a.*", lambda s, d, h: seen.append((s, d, dict(h))))
    await bus.publish_bytes("a.b", b"data", content_type="text/x", headers={"Extra": "1"})
    await eventually(lambda: seen)
    assert seen == [("a.b", b"data", {"Content-Type": "text/x", "Extra": "1"})]
