"""What the clients of the Messages API send, and the same with mistakes in it: an answer or a clear refusal, never a crash."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_testkit.agent_requests.anthropic import all_requests, claude_count, claude_headers
from kvbus_testkit.agent_requests.mutations import mutated
from kvbus_tokenizers import byte_level_bundle

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
REQUESTS = all_requests()
HEADERS = claude_headers()
COUNT = "/v1/messages/count_tokens?beta=true"
MUTATIONS = 24


async def start(cluster: Any, template: str = "qwen3") -> None:
    bundle = byte_level_bundle(chat_template=(TEMPLATES / f"{template}.jinja").read_text())
    await cluster.start(bundle=bundle, card={**PARSERS, "context_length": 200_000}, model_aliases="*=m")
    cluster.worker.play = cluster.plays("fine", size=4)


async def send(cluster: Any, body: Any, path: str = "/v1/messages?beta=true") -> tuple[int, Any]:
    """The status and the answer, of a stream its last event."""
    async with cluster.session.post(path, data=msgspec.json.encode(body), headers=HEADERS) as response:
        data = await response.read()
        if response.content_type == "text/event-stream":
            data = data.rstrip().rpartition(b"\ndata: ")[2]
        return response.status, msgspec.json.decode(data)


@pytest.mark.parametrize("template", ["qwen3", "harmony", "mistral"])
async def test_every_client_is_answered(cluster: Any, template: str) -> None:
    await start(cluster, template)
    for name, body in REQUESTS.items():
        status, found = await send(cluster, {**body, "stream": False})
        assert (status, found.get("role")) == (200, "assistant"), f"{name}: {found}"
    status, found = await send(cluster, claude_count(), COUNT)
    assert (status, set(found)) == (200, {"input_tokens"})


@pytest.mark.parametrize("name", REQUESTS)
async def test_mistakes_are_refused_clearly_or_do_no_harm(cluster: Any, name: str) -> None:
    await start(cluster)
    for number in range(MUTATIONS):
        body = mutated(REQUESTS[name], random.Random(f"{name} {number}"))
        body = {**body, "stream": False} if number % 4 else body
        counts = number % 8 == 7
        status, found = await send(cluster, body, COUNT) if counts else await send(cluster, body)
        told = f"{name} {number}: {found}"
        assert status == 200 or 400 <= status < 500, told
        if status == 200 and not counts:
            assert found["type"] == ("message_stop" if body.get("stream") else "message"), told
        if status != 200:
            assert found["type"] == "error", told
            assert found["error"]["type"] in ("invalid_request_error", "not_found_error"), told
            assert found["error"]["message"], told


# an answer on its way back

RAW = (
    "<think>\nI look.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "Read", "arguments": {"path":"a.txt",  "limit": 1.0, "deep": {"b": 1e2, "a": [2.50]}}}\n</tool_call>'
)
PROPERTIES = {"path": {"type": "string"}, "limit": {"type": "number"}, "deep": {"type": "object"}}
TOOL = {"name": "Read", "description": "reads", "input_schema": {"type": "object", "properties": PROPERTIES}}


def verbatim(block: Any) -> Any:
    return block


def through_javascript(block: Any) -> Any:
    """Whole numbers lose their point, and the order of keys is another."""
    if block["type"] != "tool_use":
        return block
    return {**block, "input": {"limit": 1, "deep": {"a": [2.5], "b": 100}, "path": "a.txt"}}


def with_plain_ids(block: Any) -> Any:
    """OpenClaw keeps letters and digits alone."""
    return {**block, "id": "".join(filter(str.isalnum, block["id"]))} if "id" in block else block


def without_signature(block: Any) -> Any:
    return {"type": "thinking", "thinking": block["thinking"]} if block["type"] == "thinking" else block


def with_empty_signature(block: Any) -> Any:
    return {**block, "signature": ""} if block["type"] == "thinking" else block


def with_signature_alone(block: Any) -> Any:
    return {**block, "thinking": ""} if block["type"] == "thinking" else block


def with_cache_control(block: Any) -> Any:
    return {**block, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "client",
    [
        verbatim, through_javascript, with_plain_ids, without_signature, with_empty_signature, with_signature_alone,
        with_cache_control,
    ],
)  # fmt: skip
async def test_an_answer_comes_back_as_it_was_generated(cluster: Any, client: Callable[[Any], Any]) -> None:
    await start(cluster)
    cluster.says(RAW)
    body = {"model": "m", "max_tokens": 500, "tools": [TOOL], "messages": [{"role": "user", "content": "go"}]}
    _, answer = await cluster.post("/v1/messages", body)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    content = [client(block) for block in answer["content"]]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "text"}
    history = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    await cluster.post("/v1/messages", {**body, "messages": [*body["messages"], *history]})  # type: ignore[misc]
    first, second = cluster.prompts()
    assert second.startswith(first + RAW)


async def test_a_thought_that_a_client_shows_as_text_stands_as_text(cluster: Any) -> None:
    await start(cluster)
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {"type": "text", "text": "Looking."}]},
        {"role": "user", "content": "and?"},
    ]
    await cluster.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": history})
    assert "assistant\nI look.\nLooking." in cluster.prompts()[0]
