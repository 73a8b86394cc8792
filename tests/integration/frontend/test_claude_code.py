"""What Claude Code needs beyond the Messages API itself, with requests of its structure."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_testkit.agent_requests.anthropic import (
    Body,
    assistant,
    claude_code,
    claude_count,
    claude_headers,
    references,
    session_id,
    tool_loop,
    tool_result,
    tool_use,
    user,
)
from kvbus_testkit.responses import parse_events
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.request import SessionRef

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
CODER = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3", "context_length": 200_000}
MESSAGES = "/v1/messages?beta=true"


async def start(cluster: Any, **settings: Any) -> None:
    bundle = byte_level_bundle(chat_template=(TEMPLATES / "qwen35.jinja").read_text())
    await cluster.start(bundle=bundle, card=CODER, model_aliases="*=m", **settings)


async def ask(cluster: Any, body: Body, **headers: Any) -> tuple[int, Any]:
    given = claude_headers(**headers)
    status, found = await cluster.post(MESSAGES, {**body, "stream": False}, headers=given)
    return status, found


def blocks(message: Any) -> list[bytes]:
    return [message.keys[i : i + 16] for i in range(0, len(message.keys), 16)]


@pytest.mark.parametrize("version", ["2.1.332", "2.1.197", "2.1.140", "2.1.42"])
async def test_sessions_and_turns_share_the_blocks_of_their_prompts(cluster: Any, version: Any) -> None:
    await start(cluster)
    first = claude_code(version=version)
    later = claude_code(*tool_loop(), version=version, request=2)
    another = claude_code(version=version, session=2, question="what is in this folder?")
    for body, session in ((first, 1), (later, 1), (another, 2)):
        assert (await ask(cluster, body, version=version, session=session))[0] == 200
    made, turn_2, session_2 = (blocks(message) for message in cluster.router.requests)
    assert len(set(made) & set(turn_2)) >= 0.97 * len(made)
    assert len(set(made) & set(session_2)) >= 0.97 * len(session_2)
    sessions = [message.session for message in cluster.router.requests]
    assert sessions == [SessionRef(id=session_id(1)), SessionRef(id=session_id(1)), SessionRef(id=session_id(2))]
    await ask(cluster, first, version=version, session=1, agent="a0123456789abcdef")
    assert cluster.router.requests[-1].session == SessionRef(id="a0123456789abcdef", parent=session_id(1))


async def test_a_tool_that_a_search_has_loaded_is_called_by_its_schema_and_changes_nothing_before(cluster: Any) -> None:
    await start(cluster)
    cluster.says(
        "<tool_call>\n<function=WebFetch>\n<parameter=timeout>\n5\n</parameter>\n<parameter=command>\n5\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    history = [
        assistant(tool_use("toolu_1", "ToolSearch", query="fetch")),
        user(tool_result("toolu_1", references("WebFetch"))),
    ]
    assert (await ask(cluster, claude_code(history[0], user(tool_result("toolu_1", "")))))[0] == 200
    status, found = await ask(cluster, claude_code(*history, loaded=("WebFetch",)))
    assert (status, found["stop_reason"]) == (200, "tool_use")
    assert found["content"][-1]["input"] == {"timeout": 5, "command": "5"}
    before, loaded = cluster.prompts()
    shown = loaded[loaded.index("<functions>\n") : loaded.index("</functions>")].splitlines()[1:]
    description = json.loads(shown[0].removeprefix("<function>").removesuffix("</function>"))
    assert list(description) == ["description", "name", "parameters"]
    assert description["name"] == "WebFetch"
    assert loaded.startswith(before[: before.rindex("<tool_response>")])
    assert "DeferredToolPlaceholder" not in loaded


@pytest.mark.parametrize("waits", ["for a place", "for its first token"])
async def test_a_prompt_that_waits_keeps_the_connection_alive_with_pings(cluster: Any, waits: str) -> None:
    """It gives up when no byte has come for five minutes, and sends everything again."""
    await start(cluster, keep_alive_s=0.01)
    data = await cluster.kept_waiting(
        MESSAGES, claude_code(), waits=waits, sign=b"event: ping", text="</think>late", headers=claude_headers()
    )
    events = parse_events(data)
    names = [event["type"] for event in events]
    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert names[-1] == "message_stop"
    usage = events[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] > 30_000, (
        "the client shows how full the context is"
    )


async def test_counts_need_no_place_and_many_come_at_once(cluster: Any) -> None:
    await start(cluster, max_concurrent_requests=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        begun.set()
        await go_on.wait()
        await output.end()

    cluster.worker.play = play
    running = asyncio.create_task(ask(cluster, claude_code()))
    await begun.wait()
    count = "/v1/messages/count_tokens?beta=true"
    found = await asyncio.gather(*(cluster.post(count, claude_count(), headers=claude_headers()) for _ in range(25)))
    assert {status for status, _ in found} == {200}
    assert len({counted["input_tokens"] for _, counted in found}) == 1
    async with cluster.session.post(MESSAGES, json=claude_code()) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (529, "1")
        assert (await refused.json())["error"]["type"] == "overloaded_error"
    go_on.set()
    assert (await running)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_cluster_says_when_to_come_back(cluster: Any, stream: bool) -> None:
    await start(cluster)
    reply = ErrorReply(code=ErrorCode.OVERLOADED, message="the queue is full", retryable=False, retry_after_s=3.0)

    async def refuse(output: Any) -> None:
        await output.end("error", error=reply)

    cluster.worker.play = refuse
    async with cluster.session.post(MESSAGES, json={**claude_code(), "stream": stream}) as response:
        found = msgspec.json.decode(await response.read())
    assert (response.status, response.headers["Retry-After"]) == (529, "3")
    assert found["error"] == {"type": "overloaded_error", "message": "Overloaded: the queue is full"}


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_a_look_whether_anybody_is_there_is_answered_without_a_key(cluster: Any, path: str) -> None:
    await start(cluster, api_key="secret")
    async with cluster.session.head(path, headers={"User-Agent": "claude-cli/2.1.332"}) as response:
        assert (response.status, await response.read()) == (200, b"")
