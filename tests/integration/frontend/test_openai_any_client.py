"""Requests as the clients of OpenAI's APIs send them, and the same with mistakes: an answer or a clear refusal, never a crash."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_testkit.agent_requests.mutations import mutated
from kvbus_testkit.agent_requests.openai import Request
from kvbus_testkit.agent_requests.openai_responses import all_requests
from kvbus_tokenizers import byte_level_bundle

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
REQUESTS = all_requests()
MUTATIONS = 30
REFUSALS = ("invalid_request_error", "not_found_error")


async def start(cluster: Any, template: str = "qwen3") -> None:
    bundle = byte_level_bundle(chat_template=(TEMPLATES / f"{template}.jinja").read_text())
    await cluster.start(bundle=bundle, card={**PARSERS, "context_length": 500_000}, model_aliases="*=m")
    cluster.worker.play = cluster.plays("fine", size=4)


async def send(cluster: Any, request: Request, body: Any) -> tuple[int, Any]:
    """The status and the answer, of a stream its last event before the sentinel."""
    data = msgspec.json.encode(body)
    async with cluster.session.post(request.path, data=data, headers=request.headers) as response:
        data = await response.read()
        if response.content_type == "text/event-stream":
            data = data.removesuffix(b"data: [DONE]\n\n").rstrip().rpartition(b"data: ")[2]
        return response.status, msgspec.json.decode(data)


@pytest.mark.parametrize("template", ["qwen3", "harmony", "mistral"])
async def test_every_client_is_answered(cluster: Any, template: str) -> None:
    await start(cluster, template)
    for name, request in REQUESTS.items():
        body = {key: value for key, value in request.body.items() if key not in ("stream", "stream_options")}
        status, found = await send(cluster, request, body)
        assert (status, found.get("object")) in ((200, "response"), (200, "chat.completion")), f"{name}: {found}"


@pytest.mark.parametrize("name", REQUESTS)
async def test_mistakes_are_refused_clearly_or_do_no_harm(cluster: Any, name: str) -> None:
    await start(cluster)
    request = REQUESTS[name]
    for number in range(MUTATIONS):
        body = mutated(request.body, random.Random(f"{name} {number}"))
        status, found = await send(cluster, request, body)
        told = f"{name} {number}: {status} {found}"
        if status == 200:
            kinds = (found.get("type"), found.get("object"))
            assert kinds[0] == "response.completed" or kinds[1] in (
                "response",
                "chat.completion",
                "chat.completion.chunk",
            ), told
        else:
            assert 400 <= status < 500, told
            assert found["error"]["type"] in REFUSALS, told
            assert found["error"]["message"], told
