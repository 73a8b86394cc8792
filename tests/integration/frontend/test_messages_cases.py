"""Cases of the Messages API with known answers, judged on the running server."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_protocols import RequestDecoder
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.messages import MessagesRequest
from kvbus_protocols.messages_turns import messages_conversation
from kvbus_testkit.api_cases import by_id, chat_messages, check_steps, holds, matches, parsers_of, read_cases

CASES = read_cases(Path(__file__).with_name("api_cases.jsonl"), "anthropic_request")
CONVERTED = [
    case for case in CASES if {"chat_messages", "chat_messages_contain_in_order", "chat_params"} & {*case["expected"]}
]
REFUSED = [case for case in CASES if case["expected"].get("http_status", 200) != 200]
ANSWERED = [case for case in CASES if "model_output" in case]


def chat_params(conversation: Conversation) -> dict[str, Any]:
    choice = conversation.tool_choice
    named = {"type": "function", "function": {"name": choice.names[0]}} if choice.named else choice.mode
    return {
        "max_tokens": conversation.generation.token_limit,
        "tool_choice": named,
        "parallel_tool_calls": conversation.parallel_tool_calls,
    }


@pytest.mark.parametrize("case", **by_id(CONVERTED))
async def test_a_request_means_what_the_case_says(cluster: Any, case: dict[str, Any]) -> None:
    expected = case["expected"]
    conversation = messages_conversation(RequestDecoder(MessagesRequest).decode(msgspec.json.encode(case["request"])))
    found = chat_messages(conversation)
    if "chat_messages" in expected:
        assert len(found) == len(expected["chat_messages"])
        assert all(map(matches, found, expected["chat_messages"])), found
    for wanted in expected.get("chat_messages_contain_in_order", []):
        while found and not matches(found[0], wanted):
            found.pop(0)
        assert found, wanted
    assert holds(chat_params(conversation), expected.get("chat_params", {}))
    await cluster.start()
    status, _ = await cluster.post("/v1/messages", case["request"])
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", **by_id(REFUSED))
async def test_a_refusal_comes_before_the_stream(cluster: Any, case: dict[str, Any], stream: bool) -> None:
    await cluster.start()
    status, body = await cluster.post("/v1/messages", {**case["request"], "stream": stream})
    assert status == case["expected"]["http_status"]
    assert body["type"] == case["expected"]["error_body"]["type"]
    assert body["error"]["type"] == case["expected"]["error_body"]["error"]["type"]
    assert body["error"]["message"]


# the answer


def outline(event: dict[str, Any]) -> str:
    inner = event.get("content_block") or event.get("delta") or {}
    parts = (event["type"], str(event.get("index", "")), inner.get("type", ""))
    return ":".join(part for part in parts if part)


def check_message(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert message["stop_reason"] == expected["stop_reason"]
    assert len(message["content"]) == len(expected["content"])
    for found, wanted in zip(message["content"], expected["content"], strict=True):
        assert holds(found, wanted)
    ids = [block["id"] for block in message["content"] if "id" in block]
    assert len({*ids}) == len(ids)
    assert all(block.get("signature", "x") for block in message["content"])


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """As a client does it that knows no more than the documents say."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop" if event["index"] in arguments:
                message["content"][event["index"]]["input"] = json.loads(arguments[event["index"]])
            case "message_delta":
                message.update(event["delta"])
                message["usage"] = event["usage"]
    return message


async def events_of(cluster: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with cluster.session.post("/v1/messages", json=request) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("size", [1, 10_000], ids=["bytes", "whole"])
@pytest.mark.parametrize("case", **by_id(ANSWERED))
async def test_an_answer_has_the_events_of_the_case_however_it_is_cut(
    cluster: Any, case: dict[str, Any], size: int
) -> None:
    await cluster.start(card=parsers_of(case))
    cluster.says(case["model_output"], size=size, finish=case.get("finish", "stop"))
    expected = case["expected"]
    events = await events_of(cluster, case["request"])
    if "events" in expected:
        check_steps([outline(event) for event in events if event["type"] != "ping"], expected["events"])
        check_message(assembled(events), expected["message"])
        status, body = await cluster.post("/v1/messages", {**case["request"], "stream": False})
        assert status == 200
        check_message(body, expected["message"])
    if "first_event" in expected:
        first, message = events[0], expected["first_event"]["message"]
        assert first["type"] == expected["first_event"]["type"]
        assert holds(first["message"], message)
        assert {*expected["first_event"]["message_has"]} <= first["message"].keys()
        (delta,) = [event for event in events if event["type"] == "message_delta"]
        assert {*expected["message_delta_has"]} <= delta.keys()
        assert events[-1]["type"] == expected["last_event"]
