"""WebSocket mode of /v1/responses."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvbus_testkit.responses import check_stream
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode, ErrorReply

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """A client; ``turn`` sends a frame and reads up to the end of its response."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def turn(self, content: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
        await self.send(content, **fields)
        return await self.read()

    async def send(self, content: Any = "hi", **fields: Any) -> None:
        await self.socket.send_json({"type": "response.create", "model": "m", "input": content, **fields})

    async def read(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in TERMINAL:
            message = await self.socket.receive()
            assert message.type is aiohttp.WSMsgType.TEXT, message
            events.append(json.loads(message.data))
        return events

    async def refused(self, content: Any = "hi", **fields: Any) -> dict[str, Any]:
        (event,) = await self.turn(content, **fields)
        assert event["type"] == "error"
        return {"status": event["status"], **event["error"]}


async def connect(cluster: Any) -> Socket:
    """Closed at the end of the test."""
    socket = await cluster.session.ws_connect("/v1/responses")
    cluster.stack.push_async_callback(socket.close)
    return Socket(socket)


async def test_turns_come_one_after_the_other_with_the_events_of_a_stream(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    finals = [check_stream(await socket.turn(f"turn {i}")) for i in range(3)]
    assert len({final["id"] for final in finals}) == 3
    assert [prompt.split()[2] for prompt in cluster.prompts()] == ["0", "1", "2"]
    await socket.socket.close()
    await eventually(lambda: cluster.metric("websockets_open") == 0)


async def test_frames_that_come_early_wait_for_their_turn(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    for i in range(3):
        await socket.send(f"turn {i}")
    for _ in range(3):
        check_stream(await socket.read())
    assert [prompt.split()[2] for prompt in cluster.prompts()] == ["0", "1", "2"]


async def test_what_is_not_stored_can_be_continued_on_its_connection_only(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    first = check_stream(await socket.turn("one", store=False))
    second = check_stream(await socket.turn("two", store=False, previous_response_id=first["id"]))
    assert cluster.prompts()[1].split() == ["user", "one", "assistant", "Hello", "world", "user", "two", "assistant"]
    refusal = await (await connect(cluster)).refused("three", previous_response_id=second["id"])
    assert (refusal["status"], refusal["code"]) == (400, "previous_response_not_found")
    assert refusal["param"] == "previous_response_id"
    check_stream(await socket.turn("three", store=False, previous_response_id=second["id"]))


async def test_what_is_stored_can_be_continued_anywhere(cluster: Any) -> None:
    await cluster.start()
    first = check_stream(await (await connect(cluster)).turn("one"))
    check_stream(await (await connect(cluster)).turn("two", previous_response_id=first["id"]))
    status, _ = await cluster.respond("three", previous_response_id=first["id"])
    assert status == 200


async def test_a_turn_that_is_refused_forgets_what_it_continued(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    first = check_stream(await socket.turn("one", store=False))
    orphan = [{"type": "function_call_output", "call_id": "nowhere", "output": ""}]
    refusal = await socket.refused(orphan, store=False, previous_response_id=first["id"])
    assert (refusal["status"], refusal["code"]) == (400, "unknown_call_id")
    refusal = await socket.refused("again", store=False, previous_response_id=first["id"])
    assert refusal["code"] == "previous_response_not_found"
    check_stream(await socket.turn("new"))


async def test_a_turn_that_fails_forgets_what_it_continued(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    first = check_stream(await socket.turn("one", store=False))
    play = cluster.worker.play

    async def fail(output: Any) -> None:
        await output.started()
        await output.say("half")
        await output.end("error", error=ErrorReply(code=ErrorCode.INTERNAL, message="x", retryable=False))

    cluster.worker.play = fail
    failed = check_stream(await socket.turn("two", store=False, previous_response_id=first["id"]))
    assert failed["status"] == "failed"
    cluster.worker.play = play
    for gone in (first, failed):
        refusal = await socket.refused("three", store=False, previous_response_id=gone["id"])
        assert refusal["code"] == "previous_response_not_found"


async def test_a_warm_up_can_be_continued(cluster: Any) -> None:
    """As Codex does it: everything but the question first, and the question alone behind it."""
    await cluster.start()
    socket = await connect(cluster)
    developer = {"role": "developer", "content": "rules"}
    warm = check_stream(await socket.turn([developer], store=False, generate=False))
    assert warm["output"] == []
    check_stream(await socket.turn("hi", store=False, previous_response_id=warm["id"]))
    warmed, asked = cluster.prompts()
    assert (warmed.split(), asked.split()) == (["system", "rules"], ["system", "rules", "user", "hi", "assistant"])
    assert cluster.worker.requests[0].stopping.max_tokens == 1


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ({"type": "response.cancel", "model": "m", "input": "x"}, "type"),
        ({"model": "m", "input": "x"}, "type"),
        ({"type": "response.create", "input": "x"}, "model"),
        ({"type": "response.create", "model": "m", "input": "x", "background": True}, "background"),
        ({"type": "response.create", "model": "m", "input": "x", "temperature": 3}, "temperature"),
        ({"type": "response.create", "model": "m", "input": []}, "input"),
    ],
)
async def test_a_bad_frame_is_refused_and_the_connection_stays(cluster: Any, frame: dict[str, Any], param: str) -> None:
    await cluster.start()
    socket = await connect(cluster)
    await socket.socket.send_json(frame)
    (event,) = await socket.read()
    assert (event["status"], event["error"]["param"]) == (400, param)
    check_stream(await socket.turn())


@pytest.mark.parametrize("frame", ["no json", "[]", '"x"'])
async def test_a_frame_that_is_no_object_is_refused(cluster: Any, frame: str) -> None:
    await cluster.start()
    socket = await connect(cluster)
    await socket.socket.send_str(frame)
    (event,) = await socket.read()
    assert event["status"] == 400


async def test_half_a_surrogate_pair_is_read_as_in_any_body(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    await socket.socket.send_str(
        '{"type": "response.create", "model": "m", "input": "a\\ud83d", "metadata": {"k": "\\udc00"}}'
    )
    assert check_stream(await socket.read())["metadata"] == {"k": "\ufffd"}
    assert "a\ufffd" in cluster.prompts()[0]


async def test_binary_frames_are_refused(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    await socket.socket.send_bytes(b"{}")
    (event,) = await socket.read()
    assert event["error"]["code"] == "invalid_frame"


async def test_a_frame_above_the_limit_ends_the_connection(cluster: Any) -> None:
    await cluster.start(max_body_bytes=1000)
    socket = await connect(cluster)
    await socket.send("x" * 1000)
    message = await socket.socket.receive()
    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1009)


async def test_frames_beyond_the_limit_are_refused(cluster: Any) -> None:
    await cluster.start(max_websocket_frames=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(output: Any) -> None:
        begun.set()
        await go_on.wait()
        await output.started()
        await output.end()

    cluster.worker.play = wait
    socket = await connect(cluster)
    await socket.send("one")
    await begun.wait()
    await socket.send("two")
    (refusal,) = await socket.turn("three")
    assert (refusal["status"], refusal["error"]["code"]) == (429, "too_many_frames")
    assert cluster.metric("requests_refused_total", limit="websocket_frames") == 1
    go_on.set()
    check_stream(await socket.read())
    check_stream(await socket.read())


async def test_connections_beyond_the_limit_are_refused(cluster: Any) -> None:
    await cluster.start(max_websockets=1)
    first = await connect(cluster)
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await connect(cluster)
    assert refusal.value.status == 503
    assert cluster.metric("requests_refused_total", limit="websockets") == 1
    check_stream(await first.turn())


async def test_an_old_connection_is_told_and_closed(cluster: Any) -> None:
    await cluster.start(websocket_lifetime_s=0.05)
    socket = await connect(cluster)
    (event,) = await socket.read()
    assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
    assert (await socket.socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_a_client_that_leaves_ends_its_response(cluster: Any) -> None:
    await cluster.start()
    begun = asyncio.Event()

    async def wait(output: Any) -> None:
        await output.started()
        begun.set()

    cluster.worker.play = wait
    socket = await connect(cluster)
    await socket.send()
    await begun.wait()
    await socket.socket.close()
    await cluster.worker.cancelled()
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_a_server_that_stops_closes_its_connections(cluster: Any) -> None:
    await cluster.start()
    socket = await connect(cluster)
    check_stream(await socket.turn())
    cluster.frontend.service.stop("test")
    message = await socket.socket.receive()
    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)


async def test_a_plain_get_is_told_to_upgrade(cluster: Any) -> None:
    await cluster.start()
    async with cluster.session.get("/v1/responses") as response:
        assert (response.status, response.headers["Upgrade"]) == (426, "websocket")


async def test_keys_are_asked_for(cluster: Any) -> None:
    await cluster.start(api_key="secret")
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await connect(cluster)
    assert refusal.value.status == 401
