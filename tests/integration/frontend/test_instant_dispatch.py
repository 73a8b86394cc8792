"""A finished call is announced with its last character, on all three APIs: a model that goes on afterwards delays nobody."""

import asyncio
from typing import Any

import pytest

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"port": {"type": "string"}}}
QUESTION = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    # what is sent, and the event that announces a call
    "/v1/chat/completions": (
        {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "tide", "parameters": SCHEMA}}]},
        "event: tool_call_dispatch\n",
    ),
    "/v1/messages": (
        {"messages": QUESTION, "max_tokens": 99, "tools": [{"name": "tide", "input_schema": SCHEMA}]},
        "event: content_block_stop\n",
    ),
    "/v1/responses": (
        {"input": QUESTION, "tools": [{"type": "function", "name": "tide", "parameters": SCHEMA, "strict": False}]},
        "event: response.output_item.done\n",
    ),
}
FORMATS = {
    # the call up to its last character, and what the format writes behind it
    "hermes": ('<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}', "\n</tool_call>"),
    "qwen3_coder": (
        "<tool_call>\n<function=tide>\n<parameter=port>\nBrest\n</parameter>\n</function>",
        "\n</tool_call>",
    ),
    "mistral": ('[TOOL_CALLS]tide[ARGS]{"port": "Brest"}', ""),
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("parser", FORMATS)
async def test_a_call_is_announced_with_its_last_character(cluster: Any, path: str, parser: str) -> None:
    call, rest = FORMATS[parser]
    request, announcement = REQUESTS[path]
    await cluster.start(card={"tool_call_parser": parser}, enable_streaming_tool_dispatch=True)
    announced = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say(call[:-1])
        await output.say(call[-1])
        await announced.wait()  # goes on only after the client has been told
        await output.say(rest)
        await output.end()

    cluster.worker.play = play
    received = ""
    async with cluster.session.post(path, json={"model": "m", "stream": True, **request}) as response:
        assert response.status == 200, await response.text()
        async for piece, _ in response.content.iter_chunks():
            received += piece.decode()
            if announcement in received:
                announced.set()
    assert announced.is_set()
    assert received.count(announcement) == 1
    assert "Brest" in received
