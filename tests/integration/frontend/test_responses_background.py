"""Responses that run with nobody connected."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from kvbus_frontend.adapters.response_store import ResponseStore
from kvbus_frontend.core.response_ids import new_response_id
from kvbus_frontend.core.stored_responses import StoredResponse
from kvbus_testkit.responses import check_schema, check_stream, parse_events
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode, ErrorReply


class Speaker:
    """A worker that says one word, and the rest when it is told to."""

    def __init__(self) -> None:
        self.spoken = asyncio.Event()
        self.go_on = asyncio.Event()

    async def play(self, output: Any) -> None:
        await output.started()
        await output.say("Hello")
        self.spoken.set()
        await self.go_on.wait()
        await output.say(" world")
        await output.end()


@pytest.fixture
async def speaker(cluster: Any) -> Speaker:
    await cluster.start()
    speaker = Speaker()
    cluster.worker.play = speaker.play
    return speaker


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(f"/v1/responses/{path}") as response:
        return response.status, await response.json()


async def cancel(session: aiohttp.ClientSession, response_id: str) -> tuple[int, Any]:
    async with session.post(f"/v1/responses/{response_id}/cancel") as response:
        return response.status, await response.json()


async def events_of(session: aiohttp.ClientSession, path: str) -> list[dict[str, Any]]:
    async with session.get(f"/v1/responses/{path}") as response:
        assert response.status == 200, await response.text()
        return parse_events(await response.read())


async def reaching(session: aiohttp.ClientSession, response_id: str, *statuses: str) -> Any:
    """The response once it has one of these statuses."""
    async with asyncio.timeout(30):
        while True:
            _, found = await get(session, response_id)
            if found["status"] in statuses:
                return found


async def second_frontend(cluster: Any) -> aiohttp.ClientSession:
    """The session of the first one; the cluster then talks to the second."""
    session: aiohttp.ClientSession = cluster.session
    await cluster.add_frontend(instance_id="other")
    await eventually(lambda: cluster.frontend.service.health.ready, what="a second frontend")
    return session


async def read_until(response: aiohttp.ClientResponse, done: Callable[[bytes], bool]) -> bytes:
    data = b""
    while not done(data):
        data += await response.content.readany()
    return data


async def test_it_is_queued_then_runs_and_is_found_when_it_has_ended(cluster: Any, speaker: Speaker) -> None:
    status, queued = await cluster.respond(background=True, metadata={"k": "v"})
    check_schema("Response", queued)
    assert (status, queued["status"], queued["output"], queued["background"]) == (200, "queued", [], True)
    await speaker.spoken.wait()
    running = await reaching(cluster.session, queued["id"], "in_progress")
    assert running["id"] == queued["id"]
    status, body = await cluster.respond(previous_response_id=queued["id"])
    assert (status, body["error"]["code"]) == (400, "previous_response_in_progress")
    speaker.go_on.set()
    ended = await reaching(cluster.session, queued["id"], "completed")
    check_schema("Response", ended)
    assert ended["output"][0]["content"][0]["text"] == "Hello world"
    assert ended["metadata"] == {"k": "v"}
    status, _ = await cluster.respond("next", previous_response_id=queued["id"])
    assert status == 200


async def test_its_events_can_be_followed_from_anywhere_and_from_any_number(cluster: Any, speaker: Speaker) -> None:
    first = await second_frontend(cluster)
    request = {"model": "m", "input": "hi", "background": True, "stream": True}
    async with first.post("/v1/responses", json=request) as response:
        assert response.content_type == "text/event-stream"
        begun = await read_until(response, lambda data: b"output_text.delta" in data)
    response_id = parse_events(begun)[0]["response"]["id"]  # the client has left
    following = asyncio.create_task(events_of(cluster.session, f"{response_id}?stream=true"))
    speaker.go_on.set()
    events = await following
    final = check_stream(events)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert final["output"][0]["content"][0]["text"] == "Hello world"
    for session in (first, cluster.session):
        assert await events_of(session, f"{response_id}?stream=true&starting_after=4") == events[5:]
        assert (await get(session, response_id))[1] == final


async def test_a_response_that_was_not_streamed_cannot_be_streamed_later(cluster: Any, speaker: Speaker) -> None:
    speaker.go_on.set()
    _, queued = await cluster.respond(background=True)
    _, foreground = await cluster.respond()
    for made in (queued, foreground):
        status, body = await get(cluster.session, f"{made['id']}?stream=true")
        assert (status, body["error"]["param"]) == (400, "stream")


async def test_a_bad_number_is_refused(cluster: Any, speaker: Speaker) -> None:
    speaker.go_on.set()
    events = await cluster.respond_stream(background=True)
    path = f"{events[0]['response']['id']}?stream=true&starting_after=x"
    status, body = await get(cluster.session, path)
    assert (status, body["error"]["param"]) == (400, "starting_after")


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_it_can_be_cancelled_from_any_frontend(cluster: Any, speaker: Speaker, elsewhere: bool) -> None:
    first = await second_frontend(cluster)
    request = {"model": "m", "input": "hi", "background": True, "stream": True}
    async with first.post("/v1/responses", json=request) as response:
        begun = await read_until(response, lambda data: b"output_text.delta" in data)
        response_id = parse_events(begun)[0]["response"]["id"]
        status, cancelled = await cancel(cluster.session if elsewhere else first, response_id)
        events = parse_events(begun + await response.read())
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert check_stream(events) == cancelled
    assert cancelled["output"][0]["content"][0]["text"] == "Hello"
    await cluster.worker.cancelled()
    assert await cancel(first, response_id) == (200, cancelled)
    assert await get(cluster.session, response_id) == (200, cancelled)


async def test_one_that_has_ended_stays_as_it_is_when_it_is_cancelled(cluster: Any, speaker: Speaker) -> None:
    speaker.go_on.set()
    _, queued = await cluster.respond(background=True)
    ended = await reaching(cluster.session, queued["id"], "completed")
    assert await cancel(cluster.session, queued["id"]) == (200, ended)


async def test_a_synchronous_response_cannot_be_cancelled(cluster: Any, speaker: Speaker) -> None:
    speaker.go_on.set()
    _, made = await cluster.respond()
    status, body = await cancel(cluster.session, made["id"])
    assert (status, body["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_deleting_one_that_runs_ends_it(cluster: Any, speaker: Speaker) -> None:
    _, queued = await cluster.respond(background=True)
    await speaker.spoken.wait()
    async with cluster.session.delete(f"/v1/responses/{queued['id']}") as response:
        assert response.status == 200
    await cluster.worker.cancelled()
    assert (await get(cluster.session, queued["id"]))[0] == 404


async def test_an_engine_that_fails_fails_the_response(cluster: Any) -> None:
    await cluster.start()
    error = ErrorReply(code=ErrorCode.INTERNAL, message="engine died", retryable=False)

    async def before(output: Any) -> None:
        await output.end("error", error=error)

    async def amid(output: Any) -> None:
        await output.started()
        await output.say("half")
        await output.end("error", error=error)

    for play in (before, amid):
        cluster.worker.play = play
        events = await cluster.respond_stream(background=True)
        final = check_stream(events)
        assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
        assert await get(cluster.session, final["id"]) == (200, final)


async def test_refusals_come_at_once(cluster: Any) -> None:
    await cluster.start()
    status, body = await cluster.respond(background=True, store=False)
    assert (status, body["error"]["param"]) == (400, "background")
    status, body = await cluster.respond("x" * 1000, background=True)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_cannot_be_recorded_does_not_run(cluster: Any) -> None:
    await cluster.start(max_stored_response_bytes=10)
    status, body = await cluster.respond(background=True)
    assert (status, body["error"]["code"]) == (503, "store_unavailable")
    assert cluster.worker.requests == []
    assert cluster.metric("requests_in_flight") == 0


async def test_it_counts_as_a_request_in_flight(cluster: Any, speaker: Speaker) -> None:
    _, queued = await cluster.respond(background=True)
    await speaker.spoken.wait()
    assert cluster.metric("requests_in_flight") == 1
    speaker.go_on.set()
    await reaching(cluster.session, queued["id"], "completed")
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_a_frontend_that_stops_ends_it_with_a_record(cluster: Any, speaker: Speaker) -> None:
    _, queued = await cluster.respond(background=True)
    await speaker.spoken.wait()
    cluster.frontend.service.stop("test")
    await cluster.add_frontend(instance_id="other")
    await eventually(lambda: cluster.frontend.service.health.ready, what="a second frontend")
    failed = await reaching(cluster.session, queued["id"], "failed")
    assert failed["error"]["code"] == "server_error"


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_a_response_whose_frontend_is_gone_has_failed(cluster: Any, status: str) -> None:
    """As a crash leaves it: a record that nobody will ever end."""
    await cluster.start(keep_alive_s=0.01)
    _, like = await cluster.respond()
    service = cluster.frontend.service
    response = {**like, "id": new_response_id(), "status": status, "background": True, "output": []}
    left = StoredResponse(response=response, input=[], owner="ghost", incarnation=1, streamed=True)
    assert await ResponseStore(service.bus, service.settings, service.metrics, service.log).save(left)
    events = await events_of(cluster.session, f"{left.id}?stream=true")
    assert events[-1]["type"] == "response.failed"
    _, found = await get(cluster.session, left.id)
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert events[-1]["response"] == found
    assert await cancel(cluster.session, left.id) == (200, found)
