"""What the clients of the Messages API send, and the same with mistakes in it: an answer or a clear refusal, never a crash."""

import random
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
