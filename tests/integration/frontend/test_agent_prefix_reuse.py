"""How much of a prompt a worker has computed already, for requests as the clients of OpenAI's APIs send them, in tokens."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from kvbus_testkit.agent_requests.openai import INTERNAL, ChatAgent, OpenClaw, OpenCode, Pi, QwenCode, Request
from kvbus_testkit.agent_requests.openai_responses import (
    Codex,
    OpenClawResponses,
    ResponsesAgent,
    opencode_responses,
    pi_responses,
)
from kvbus_tokenizers import byte_level_bundle
from kvbus_tokenizers.prompt_cache import STEP_BYTES
from kvbus_wire.packing import unpack_tokens
from kvbus_worker.engines.mock.block_cache import BlockCache

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
CARD = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3", "context_length": 500_000, "block_size": 16}
KEY_BYTES = 16

Agent = ChatAgent | ResponsesAgent


WRITTEN = (
    "I run it.\n</think>\n\nLet me see.\n\n"
    "<tool_call>\n<function={}>\n<parameter=command>\necho hello\n</parameter>\n</function>\n</tool_call>"
)
"""What the model writes behind the opener of its thought, which the prompt ends with."""
DONE = "\n</think>\n\nIt printed hello."


async def start(cluster: Any, **settings: Any) -> None:
    bundle = byte_level_bundle(chat_template=(TEMPLATES / "qwen35.jinja").read_text())
    await cluster.start(bundle=bundle, card=CARD, model_aliases="*=m", **settings)


async def send(cluster: Any, request: Request, says: str = DONE) -> Any:
    cluster.says(says, size=50)
    body = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
    status, answer = await cluster.post(request.path, body, headers=request.headers)
    assert status == 200, answer
    return answer


async def turn(cluster: Any, agent: Agent, says: str = DONE) -> None:
    agent.take(await send(cluster, agent.request(), says))


def prompts(cluster: Any) -> list[list[int]]:
    return [unpack_tokens(message.tokens) for message in cluster.worker.requests]


def with_answer(prompt: Sequence[int], says: str = DONE) -> list[int]:
    """All that a worker has computed when the answer is there."""
    return [*prompt, *says.encode()]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def reused(first: Sequence[int], second: Sequence[int]) -> float:
    """The part of the second prompt that the first one has, as a share."""
    return shared(first, second) / len(second)


def text(tokens: Sequence[int]) -> bytes:
    return bytes(token if token < 256 else 0 for token in tokens)


@pytest.mark.parametrize(
    ("make", "tool"),
    [
        (Codex, "exec_command"),
        (lambda session: OpenClaw(session), "exec"),
        (lambda _session: OpenClawResponses(), "exec"),
        (OpenCode, "bash"),
        (lambda _session: opencode_responses(), "bash"),
        (lambda _session: QwenCode(), "run_shell_command"),
        (lambda _session: Pi(), "bash"),
        (lambda _session: pi_responses(), "bash"),
    ],
    ids=["codex", "openclaw", "openclaw-responses", "opencode", "opencode-responses", "qwen", "pi", "pi-responses"],
)
async def test_turns_and_sessions_reuse_what_came_before(cluster: Any, make: Callable[[int], Agent], tool: str) -> None:
    await start(cluster)
    agent, other = make(1), make(2)
    agent.ask("run echo hello")
    await turn(cluster, agent, WRITTEN.format(tool))
    agent.give("hello")
    await turn(cluster, agent)
    agent.ask("and now?")
    await turn(cluster, agent)
    other.ask("list files")
    await turn(cluster, other)
    question, result, follow_up, elsewhere = prompts(cluster)
    found = {
        "turn 2": reused(with_answer(question, WRITTEN.format(tool)), result),
        "next user turn": reused(with_answer(result), follow_up),
        "session 2": reused(question, elsewhere),
    }
    assert {name: share for name, share in found.items() if round(share, 2) < 0.99} == {}


async def test_a_compaction_reuses_the_session_although_it_brings_no_tools(cluster: Any) -> None:
    await start(cluster)
    agent, other = Codex(1), Codex(2)
    agent.ask("run echo hello")
    await turn(cluster, agent, WRITTEN.format("exec_command"))
    agent.give("hello")
    await turn(cluster, agent)
    other.ask("something else")
    await turn(cluster, other)
    summary = await send(cluster, agent.compaction(), WRITTEN.format("exec_command"))
    assert [item["type"] for item in summary["output"]] == ["reasoning", "message"]  # none of the tools may be called
    assert summary["tools"] == []  # what the request said
    agent.compacted("The user has run echo hello.")
    await turn(cluster, agent)
    _, result, _, compaction, after = prompts(cluster)
    assert round(reused(result, compaction), 2) >= 0.97
    assert round(reused(compaction, after), 2) >= 0.98
    assert cluster.metric("compactions_without_tools_total", tools="restored") == 1
    assert cluster.metric("session_tools_bytes") > 2 * 15_000


async def test_the_endpoint_that_compacts_reuses_the_session_too(cluster: Any) -> None:
    await start(cluster)
    agent = Codex()
    agent.ask("run echo hello")
    await turn(cluster, agent)
    sent = agent.request()
    body = {"model": "local-model", "input": sent.body["input"]}
    for more in ({}, {"tools": agent.tools}):
        status, _ = await cluster.post("/v1/responses/compact", {**body, **more}, headers=sent.headers)
        assert status == 200
    first, remembered, given = prompts(cluster)
    assert reused(first, remembered) > 0.97
    assert given == remembered


@pytest.mark.parametrize("room", [0, 1000], ids=["no memory", "too little memory"])
async def test_a_compaction_of_an_unknown_session_is_rendered_as_it_is(cluster: Any, room: int) -> None:
    await start(cluster, session_tools_bytes=room)
    agent = Codex()
    agent.ask("run echo hello")
    await turn(cluster, agent)
    await send(cluster, agent.compaction())
    assert b"exec_command" in text(prompts(cluster)[0])
    assert b"exec_command" not in text(prompts(cluster)[1])
    assert cluster.metric("compactions_without_tools_total", tools="missing") == 1


async def test_what_a_body_says_of_its_turn_goes_before_the_headers_of_its_connection(cluster: Any) -> None:
    """Over a WebSocket the headers are those of the first request."""
    await start(cluster)
    agent = Codex()
    agent.ask("run echo hello")
    await turn(cluster, agent)
    usual, compaction = agent.request(), agent.compaction()
    await send(cluster, Request(usual.path, usual.headers, compaction.body))
    await send(cluster, Request(usual.path, compaction.headers, {**usual.body, "tools": []}))
    assert [b"exec_command" in text(prompt) for prompt in prompts(cluster)] == [True, True, False]


@pytest.mark.parametrize("make", [OpenClaw, OpenClawResponses])
async def test_blocks_and_tokens_are_reused_up_to_a_message_that_is_gone_in_the_next_request(
    cluster: Any, make: Callable[[], Agent]
) -> None:
    await start(cluster)
    agent = make()
    agent.ask("run echo hello")
    await turn(cluster, agent)
    before = cluster.metric("prompt_cache_tokens_total", source="cache")
    agent.ask("and now?")
    await turn(cluster, agent)
    first, second = prompts(cluster)
    place = text(first).index(INTERNAL.partition("\n")[0].encode()) - len("user\n") - 1
    assert shared(first, second) >= place
    assert cluster.metric("prompt_cache_tokens_total", source="cache") - before > place - STEP_BYTES
    computed, wanted = (
        [request.keys[i : i + KEY_BYTES] for i in range(0, len(request.keys), KEY_BYTES)]
        for request in cluster.router.requests
    )
    cache = BlockCache(len(computed))
    cache.allocate(len(computed))
    for parent, key in zip([b"", *computed], computed, strict=False):
        cache.publish(parent, [key], [b""])
    assert cache.leading(wanted) == shared(first, second) // 16 >= place // 16
