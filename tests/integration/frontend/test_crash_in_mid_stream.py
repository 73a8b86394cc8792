"""A fault of the server's own, found in the middle of an answer: the stream still ends, in the way of its API."""

from typing import Any

import pytest

from kvbus_frontend.core.chat_output import ChatOutput
from kvbus_frontend.core.messages_output import Blocks
from kvbus_frontend.core.responses_output import ResponsesOutput
from kvbus_testkit.timing import eventually

DEEP = '{"q": ' + "[" * 2000 + "]" * 2000 + "}"
HERMES = {"tool_call_parser": "hermes"}


def crash(*_arguments: object) -> None:
    raise ZeroDivisionError


async def test_a_chat_stream_ends_with_an_error_and_no_sentinel(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start()
    monkeypatch.setattr(ChatOutput, "_delta", crash)
    events = await cluster.chat_stream()
    assert events[-1]["error"]["code"] == "internal"
    await eventually(lambda: cluster.metric("http_requests_total", api="chat", status="500") == 1)


async def test_a_messages_stream_ends_with_an_error_event(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start()
    monkeypatch.setattr(Blocks, "take", crash)
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with cluster.session.post("/v1/messages", json=body) as response:
        text = await response.text()
    assert text.count("event: error\n") == 1
    assert text.rpartition("event: ")[2].startswith("error\n")
    assert '"type":"api_error"' in text


async def test_a_response_ends_as_failed_and_is_stored_so(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start()
    monkeypatch.setattr(ResponsesOutput, "_take", crash)
    events = await cluster.respond_stream()
    assert [event["type"] for event in events[-1:]] == ["response.failed"]
    async with cluster.session.get(f"/v1/responses/{events[-1]['response']['id']}") as response:
        assert (await response.json())["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "name": "f"},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {"q": {}}}},
    ],
    ids=["custom", "search"],
)
async def test_arguments_nested_deeper_than_json_readers_go_are_text(cluster: Any, tool: dict[str, Any]) -> None:
    await cluster.start(card={**HERMES, "context_length": 32768})
    name = tool.get("name", "tool_search")

    async def play(output: Any) -> None:
        await output.started()
        await output.say(f'<tool_call>\n{{"name": "{name}", "arguments": {DEEP}}}\n</tool_call>')
        await output.end()

    cluster.worker.play = play
    status, answer = await cluster.respond(tools=[tool])
    assert status == 200, answer
    item = answer["output"][0]
    assert DEEP in (item["input"] if "input" in item else item["arguments"]["query"])
    assert (await cluster.respond_stream(tools=[tool]))[-1]["type"] == "response.completed"
