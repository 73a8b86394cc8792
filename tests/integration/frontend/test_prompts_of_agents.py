"""POST /v1/prompt with what agents send, and the same with mistakes in it: the prompt that a worker is sent, or its refusal."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_cli.prompt.hints import value_at
from kvbus_testkit.agent_requests.anthropic import all_requests as messages_requests
from kvbus_testkit.agent_requests.anthropic import claude_code, claude_headers, tool_loop
from kvbus_testkit.agent_requests.mutations import mutated
from kvbus_testkit.agent_requests.openai import Request
from kvbus_testkit.agent_requests.openai_responses import all_requests as openai_requests
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_keys, unpack_tokens

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
REQUESTS = {
    **openai_requests(),
    **{name: Request("/v1/messages", claude_headers(), body) for name, body in messages_requests().items()},
}
APIS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
MUTATIONS = 3
KNOWN_SHARE = 0.85
"""Of the text. The rest is the template's."""


async def start(cluster: Any, template: str = "qwen3") -> None:
    bundle = byte_level_bundle(chat_template=(TEMPLATES / f"{template}.jinja").read_text())
    await cluster.start(bundle=bundle, card={**PARSERS, "context_length": 500_000}, model_aliases="*=m")
    cluster.worker.play = cluster.plays("fine", size=4)


async def post(cluster: Any, path: str, request: Request, body: Any) -> tuple[int, bytes]:
    data = msgspec.json.encode(body)
    async with cluster.session.post(path, data=data, headers=request.headers) as response:
        return response.status, await response.read()


async def shown(cluster: Any, request: Request, body: Any) -> tuple[int, Any]:
    status, data = await post(cluster, f"/v1/prompt?api={APIS[request.path]}", request, body)
    return status, msgspec.json.decode(data)


def check(view: Any, body: Any) -> None:
    """What is said to be a field's own text is that, at that place; tools of a session stand in an earlier request."""
    restored = any(rule["rule"] == "session-tools" for rule in view["rules"])
    for segment in view["segments"]:
        if segment.get("source", "").startswith("session.tools["):
            assert restored
        elif "offset" in segment and not segment.get("escaped"):
            value = value_at(body, segment["source"])
            assert value[segment["offset"] :].startswith(segment["text"]), segment


@pytest.mark.parametrize("template", ["qwen3", "harmony", "mistral"])
async def test_the_prompts_of_agents_are_those_that_workers_are_sent_and_known_by_their_fields(
    cluster: Any, template: str
) -> None:
    await start(cluster, template)
    for name, request in REQUESTS.items():
        status, view = await shown(cluster, request, request.body)
        assert status == 200, (name, view)
        status, answer = await post(cluster, request.path, request, request.body)
        assert status == 200, (name, answer)
        assert view["tokens"] == unpack_tokens(cluster.worker.requests[-1].tokens), name
        keys = unpack_keys(cluster.router.requests[-1].keys)
        assert [block["key"] for block in view["blocks"]] == [key.hex() for key in keys], name
        check(view, request.body)
        known = sum(len(segment["text"]) for segment in view["segments"] if "source" in segment)
        whole = sum(len(segment["text"]) for segment in view["segments"])
        assert known >= KNOWN_SHARE * whole or whole < 4000, (name, known, whole)


async def test_mistakes_are_refused_as_they_are_elsewhere(cluster: Any) -> None:
    await start(cluster)
    for name, request in REQUESTS.items():
        for number in range(MUTATIONS):
            body = mutated(request.body, random.Random(f"{name} {number}"))
            status, view = await shown(cluster, request, body)
            expected, answer = await post(cluster, request.path, request, body)
            assert status == expected, (name, number, view, answer[:300])
            if status == 200:
                check(view, body)


async def test_what_prompt_stability_does_to_a_request_of_claude_code_is_told(cluster: Any) -> None:
    await start(cluster, "qwen35")
    body = claude_code(*tool_loop(), version="2.1.140", request=2)
    _, view = await shown(cluster, Request("/v1/messages", claude_headers("2.1.140"), body), body)
    rules = {rule["rule"]: rule for rule in view["rules"]}
    assert rules["anthropic-preamble"]["source"] == "system[0].text"
    assert rules["anthropic-preamble"]["text"] == body["system"][0]["text"]
    deferred = [rule["source"] for rule in view["rules"] if rule["rule"] == "deferred-tool"]
    assert deferred == [f"tools[{i}]" for i, tool in enumerate(body["tools"]) if tool.get("defer_loading")]


async def test_the_environment_that_is_moved_before_the_question_is_told_where_it_stands(cluster: Any) -> None:
    await start(cluster, "qwen35")
    body = claude_code()
    _, view = await shown(cluster, Request("/v1/messages", claude_headers(), body), body)
    assert [rule["source"] for rule in view["rules"] if rule["rule"] == "claude-environment"] == [
        "messages[1].content[0].text"
    ]
    sources = [segment["source"] for segment in view["segments"] if segment.get("source", "").startswith("messages")]
    assert sources[0] == "messages[1].content[0].text"
    assert sources[-1].startswith("messages[0].content")
