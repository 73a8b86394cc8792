"""Workers that fail, clients that leave or do not read, limits, and the end of the service."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
import yarl

from kvbus_runtime.errors import RequestFailed
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.packing import unpack_tokens

CHAT = "/v1/chat/completions"


def refuse(code: ErrorCode, *, retryable: bool = False, **fields: Any) -> Any:
    def answer(_message: Any) -> Any:
        raise RequestFailed.of(code, f"refused: {code}", retryable=retryable, **fields)

    return answer


async def test_a_stream_goes_on_unbroken_on_another_worker(cluster: Any) -> None:
    await cluster.start()
    second = await cluster.add_worker("w2")
    party = "a🎉b".encode()

    async def half(output: Any) -> None:
        await output.started(cached=4)
        await output.say(b"sto" + party[:3])
        await output.end("error", error=ErrorReply(code=ErrorCode.INTERNAL, message="engine died", retryable=True))

    async def rest(output: Any) -> None:
        await output.started()
        await output.say(party[3:] + b" stop never shown")
        await output.end()

    cluster.worker.play, second.play = half, rest
    events = await cluster.chat_stream(stop="stop", stream_options={"include_usage": True})
    assert cluster.text(events) == "sto" + "a🎉b "
    assert events[-1] == "[DONE]"
    message = second.requests[0]
    assert message.resumed == 6
    assert bytes(unpack_tokens(message.tokens)[-6:]) == b"sto" + party[:3]
    assert cluster.router.requests[1].excluded == ("w1",)
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    first_id = cluster.router.requests[0].request_id
    await eventually(lambda: "finished" in cluster.router.phases(first_id))
    assert cluster.metric("migrations_total", reason="internal") == 1


async def test_a_worker_that_disappears_is_left(cluster: Any) -> None:
    await cluster.start()
    second = await cluster.add_worker("w2")
    begun = asyncio.Event()

    async def hang(output: Any) -> None:
        await output.started()
        await output.say("one ")
        begun.set()

    async def rest(output: Any) -> None:
        await output.started()
        await output.say("two")
        await output.end()

    cluster.worker.play, second.play = hang, rest
    answer = asyncio.create_task(cluster.chat())
    await begun.wait()
    cluster.worker.service.stop("test")
    status, body = await answer
    assert (status, body["choices"][0]["message"]["content"]) == (200, "one two")


async def test_a_worker_that_disappears_before_it_has_answered_is_left(cluster: Any) -> None:
    await cluster.start(generate_timeout_s=3600.0)
    await cluster.add_worker("w2")
    cluster.worker.may_answer.clear()
    answer = asyncio.create_task(cluster.chat())
    await cluster.worker.asked.wait()
    cluster.worker.service.stop("test")
    status, body = await answer
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")
    assert cluster.metric("migrations_total", reason="unavailable") == 1


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE])
async def test_a_worker_that_refuses_for_now_is_passed_over(cluster: Any, code: ErrorCode) -> None:
    await cluster.start()
    await cluster.add_worker("w2")
    cluster.worker.answer = refuse(code, retryable=True)
    status, body = await cluster.chat()
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")


async def test_migration_ends_at_its_limit(cluster: Any) -> None:
    await cluster.start(migration_limit=1)
    await cluster.add_worker("w2")
    third = await cluster.add_worker("w3")
    for worker in (cluster.worker, third):
        worker.answer = refuse(ErrorCode.OVERLOADED, retryable=True)
    cluster.router.answer = lambda message: cluster.router.place(
        type(message)(
            **{f: getattr(message, f) for f in message.__struct_fields__ if f != "allowed"}, allowed=("w1", "w3")
        )
    )
    status, body = await cluster.chat()
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert len(cluster.router.requests) == 2


async def test_a_lone_worker_is_asked_again(cluster: Any) -> None:
    await cluster.start()
    answers = iter([refuse(ErrorCode.UNAVAILABLE, retryable=True), cluster.worker.answer])
    cluster.worker.answer = lambda message: next(answers)(message)
    status, _ = await cluster.chat()
    assert status == 200
    assert [message.excluded for message in cluster.router.requests] == [(), ("w1",), ()]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.UNSUPPORTED, 400),
        (ErrorCode.INVALID_REQUEST, 400),
        (ErrorCode.PAYLOAD_TOO_LARGE, 413),
        (ErrorCode.INTERNAL, 500),
    ],
)
async def test_a_refusal_of_the_worker_reaches_the_client(cluster: Any, code: ErrorCode, status: int) -> None:
    await cluster.start()
    cluster.worker.answer = refuse(code, param="kvbus.mock")
    got, body = await cluster.chat(stream=True, kvbus={"mock": {"output": "x"}})
    assert (got, body["error"]["code"], body["error"]["param"]) == (status, str(code), "kvbus.mock")


async def test_a_refusal_of_the_router_reaches_the_client_with_its_patience(cluster: Any) -> None:
    await cluster.start()
    cluster.router.answer = refuse(ErrorCode.OVERLOADED, retryable=True, retry_after_s=7.0)
    async with cluster.session.post(CHAT, json=cluster.body()) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert (await response.json())["error"]["code"] == "overloaded"


async def test_an_error_in_mid_stream_is_an_event_and_ends_the_stream(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("some")
        await output.end("error", error=ErrorReply(code=ErrorCode.INTERNAL, message="it broke"))

    cluster.worker.play = play
    events = await cluster.chat_stream()
    assert cluster.text(events) == "some"
    message = "Internal server error: it broke"
    assert events[-1] == {"error": {"message": message, "type": "server_error", "param": None, "code": "internal"}}


async def test_one_failed_choice_ends_the_others(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        if output.message.request_id.endswith("-1"):
            await output.end("error", error=ErrorReply(code=ErrorCode.INTERNAL, message="it broke"))

    cluster.worker.play = play
    status, body = await cluster.chat(n=2)
    assert (status, body["error"]["message"]) == (500, "Internal server error: it broke")
    await eventually(lambda: cluster.worker.cancels)
    assert (cluster.worker.cancels[0].request_id[-2:], cluster.worker.cancels[0].reason) == ("-0", "failed")


async def test_a_client_that_leaves_ends_the_work(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("some")
        await cluster.worker.cancelled()
        await output.end("cancelled")

    cluster.worker.play = play
    async with cluster.session.post(CHAT, json=cluster.body(stream=True)) as response:
        await response.content.readany()
        response.close()
    await eventually(lambda: cluster.worker.cancels)
    assert cluster.worker.cancels[0].reason == "client_disconnected"
    request_id = cluster.router.requests[0].request_id
    await eventually(lambda: "finished" in cluster.router.phases(request_id))
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_a_client_that_leaves_a_whole_answer_ends_the_work(cluster: Any) -> None:
    await cluster.start()
    begun = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        begun.set()

    cluster.worker.play = play
    request = asyncio.create_task(cluster.chat())
    await begun.wait()
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
    await eventually(lambda: cluster.worker.cancels)
    assert cluster.worker.cancels[0].reason == "client_disconnected"


@pytest.mark.parametrize("waits", ["for a place", "for its first token"])
async def test_a_silent_stream_gets_chunks_that_say_nothing(cluster: Any, waits: str) -> None:
    """Qwen Code gives up when no chunk has come for four minutes, and a comment is none."""
    await cluster.start(keep_alive_s=0.01)
    data = await cluster.kept_waiting(CHAT, cluster.body(), waits=waits, sign=b"data: ")
    *events, done = cluster.parse(data.decode())
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[:3] == [{"role": "assistant", "content": ""}, {}, {}]
    assert all("role" not in delta for delta in deltas[1:])
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert (cluster.text(events), events[-1]["choices"][0]["finish_reason"], done) == ("late", "stop", "[DONE]")


async def test_a_request_ends_at_its_deadline(cluster: Any) -> None:
    await cluster.start(request_timeout_s=0.2)

    async def play(output: Any) -> None:
        await output.started()
        await cluster.worker.cancelled()

    cluster.worker.play = play
    status, body = await cluster.chat()
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    await eventually(lambda: cluster.worker.cancels)
    assert cluster.worker.cancels[0].reason == "deadline"


async def test_text_that_waits_is_sent_together(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        for _ in range(200):
            await output.say("x")
        await output.end()

    cluster.worker.play = play
    events = await cluster.chat_stream()
    assert cluster.text(events) == "x" * 200


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"write_timeout_s": 0.3, "stream_buffer_chars": 1 << 40}, {"client_disconnected"}),
        ({"stream_buffer_chars": 100_000}, {"slow_client"}),
    ],
)
async def test_a_client_that_does_not_read_is_cut_off(
    cluster: Any, settings: dict[str, Any], reasons: set[str]
) -> None:
    await cluster.start(**settings)

    async def play(output: Any) -> None:
        await output.started()
        while not cluster.worker.cancels:
            await output.say(b"x" * 20_000)
            await cluster.worker.service.bus.flush()

    cluster.worker.play = play
    body = json.dumps(cluster.body(stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = yarl.URL(cluster.url)
        client.connect((url.host, url.port))
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body)
        )
        await eventually(lambda: cluster.worker.cancels, timeout_s=30)
    assert cluster.worker.cancels[0].reason in reasons
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_requests_over_the_limit_are_told_to_come_back(cluster: Any) -> None:
    await cluster.start(max_concurrent_requests=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        begun.set()
        await go_on.wait()
        await output.end()

    cluster.worker.play = play
    first = asyncio.create_task(cluster.chat())
    await begun.wait()
    async with cluster.session.post(CHAT, json=cluster.body()) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "overloaded"
    go_on.set()
    assert (await first)[0] == 200
    assert cluster.metric("requests_refused_total", limit="overloaded") == 1
    assert (await cluster.chat())[0] == 200


async def test_without_a_router_a_request_fails_clean(cluster: Any) -> None:
    cluster.worker = await cluster.add_worker()
    await cluster.add_frontend(route_retries=1)
    await eventually(lambda: cluster.frontend.service.health.is_ok("models"))
    status, body = await cluster.chat()
    assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_draining_finishes_what_runs_and_takes_nothing_new(cluster: Any) -> None:
    await cluster.start(drain_timeout_s=10.0)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        begun.set()
        await go_on.wait()
        await output.say("done")
        await output.end()

    cluster.worker.play = play
    first = asyncio.create_task(cluster.chat())
    await begun.wait()
    cluster.frontend.service.stop("test")
    async with aiohttp.ClientSession(cluster.url) as session:

        async def refused() -> bool:
            async with session.post(CHAT, json=cluster.body()) as response:
                return response.status == 503 and (await response.json())["error"]["code"] == "draining"

        # A request that came in before the drain began would wait for the event.
        await eventually(lambda: not cluster.frontend.service.health.ready)
        assert await refused()
    go_on.set()
    status, body = await first
    assert (status, body["choices"][0]["message"]["content"]) == (200, "done")


async def test_what_does_not_finish_while_draining_gets_its_error(cluster: Any) -> None:
    await cluster.start(drain_timeout_s=0.1)
    begun = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("some")
        begun.set()

    cluster.worker.play = play
    stream = asyncio.create_task(cluster.chat_stream())
    await begun.wait()
    cluster.frontend.service.stop("test")
    events = await stream
    assert cluster.text(events) == "some"
    assert events[-1]["error"]["code"] == "draining"
    await eventually(lambda: cluster.worker.cancels)
