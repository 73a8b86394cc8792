"""Structured output of all three APIs: what reaches the worker, and what comes back as a bad request."""

from typing import Any

import pytest

from kvbus_wire.errors import ErrorCode, ErrorReply

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BROKEN: dict[str, Any] = {"type": "object", "properties": []}
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "response_format": wanted}


def responses(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    return "/v1/responses", {"model": "m", "input": "hi", "store": False, "text": wanted}


def messages(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    return "/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 9, "output_config": wanted}


APIS = [(chat, "response_format"), (responses, "text.format"), (messages, "output_config.format")]
every_api = pytest.mark.parametrize(("ask", "field"), APIS, ids=["chat", "responses", "messages"])


@every_api
async def test_a_schema_travels_to_the_worker(cluster: Any, ask: Any, field: str) -> None:
    await cluster.start()
    status, _ = await cluster.post(*ask(SCHEMA))
    assert status == 200
    (request,) = cluster.worker.requests
    assert request.guidance.form == "json_schema"
    assert request.guidance.param == field


@every_api
async def test_what_is_no_schema_is_a_bad_request_in_the_words_of_the_api(cluster: Any, ask: Any, field: str) -> None:
    await cluster.start()
    status, body = await cluster.post(*ask(BROKEN))
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]
    assert body["error"].get("param", field) == field
    assert cluster.worker.requests == []


@pytest.mark.parametrize("stream", [False, True])
@every_api
async def test_what_the_engine_cannot_follow_is_a_bad_request_too(
    cluster: Any, ask: Any, field: str, stream: bool
) -> None:
    async def refuse(output: Any) -> None:
        reply = ErrorReply(code=ErrorCode.INVALID_REQUEST, message="it cannot be followed", param=field)
        await output.end("error", error=reply)

    await cluster.start()
    cluster.worker.play = refuse
    path, body = ask(SCHEMA)
    status, answer = await cluster.post(path, {**body, "stream": stream})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert "it cannot be followed" in answer["error"]["message"]
    assert len(cluster.worker.requests) == 1, "another worker would say the same"


async def test_all_choices_carry_the_same_guidance(cluster: Any) -> None:
    await cluster.start()
    path, body = chat(SCHEMA)
    status, _ = await cluster.post(path, {**body, "n": 3})
    assert status == 200
    assert len({request.guidance for request in cluster.worker.requests}) == 1
    assert len(cluster.worker.requests) == 3
