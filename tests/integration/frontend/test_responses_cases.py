"""Cases of the Responses API with known answers, judged on the running server."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_protocols import RequestDecoder
from kvbus_protocols.conversation import OutputFormat
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_protocols.responses_turns import responses_conversation
from kvbus_testkit.api_cases import by_id, chat_messages, check_steps, matches, parsers_of, read_cases
from kvbus_testkit.responses import check_schema, check_stream, parse_events

CASES = read_cases(Path(__file__).with_name("api_cases.jsonl"), "responses_request")
CONVERTED = [case for case in CASES if {"chat_messages", "chat_params"} & {*case["expected"]}]
REFUSED = [case for case in CASES if {"http_status", "http_status_in"} & {*case["expected"]}]
ANSWERED = [case for case in CASES if "model_output" in case]


def test_every_case_is_judged() -> None:
    assert len(CASES) == 13
    assert {case["id"] for case in (*CONVERTED, *REFUSED, *ANSWERED)} == {case["id"] for case in CASES}


@pytest.mark.parametrize("case", **by_id(CONVERTED))
async def test_a_request_means_what_the_case_says(cluster: Any, case: dict[str, Any]) -> None:
    expected = case["expected"]
    request = RequestDecoder(ResponsesRequest).decode(msgspec.json.encode(case["request"]))
    request.check()
    conversation = responses_conversation(request).conversation
    if "chat_messages" in expected:
        found = chat_messages(conversation)
        assert len(found) == len(expected["chat_messages"])
        assert all(map(matches, found, expected["chat_messages"])), found
    if "chat_params" in expected:
        wanted = expected["chat_params"]["response_format"]["json_schema"]
        assert conversation.output_format == OutputFormat(kind="json_schema", **wanted)
    await cluster.start()
    status, body = await cluster.post("/v1/responses", case["request"])
    assert status == 200
    check_schema("Response", body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", **by_id(REFUSED))
async def test_a_refusal_comes_before_the_stream(cluster: Any, case: dict[str, Any], stream: bool) -> None:
    await cluster.start()
    expected = case["expected"]
    status, body = await cluster.post("/v1/responses", {**case["request"], "stream": stream})
    assert status in (expected.get("http_status_in") or [expected["http_status"]])
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    if "error_code" in expected:
        assert body["error"]["code"] == expected["error_code"]


# answers


def outline(event: dict[str, Any]) -> str:
    index = str(event.get("output_index", ""))
    kind = event["item"]["type"] if event["type"] == "response.output_item.added" else ""
    return ":".join(part for part in (event["type"], index, kind) if part)


def check_response(response: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(response["output"]) == len(expected["output"])
    for found, wanted in zip(response["output"], expected["output"], strict=True):
        plain = dict(found)
        if "arguments" in plain:
            plain["arguments"] = json.loads(plain["arguments"])
        if "text" in wanted:
            plain["text"] = plain["content"][0]["text"].strip()
        for part in plain.get("content", []):
            part.pop("logprobs", None)
        assert {key: plain[key] for key in wanted} == wanted
    wanted = expected.get("response", {"status": "completed"})
    assert {key: response[key] for key in wanted} == wanted


@pytest.mark.parametrize("size", [1, 7, 10_000], ids=["bytes", "pieces", "whole"])
@pytest.mark.parametrize("case", **by_id(ANSWERED))
async def test_an_answer_has_the_events_of_the_case_however_it_is_cut(
    cluster: Any, case: dict[str, Any], size: int
) -> None:
    await cluster.start(card=parsers_of(case))
    cluster.says(case["model_output"], size=size, finish=case.get("finish", "stop"))
    async with cluster.session.post("/v1/responses", json=case["request"]) as response:
        events = parse_events(await response.read())
    check_steps(list(map(outline, events)), case["expected"]["events"])
    check_response(check_stream(events), case["expected"])
    status, body = await cluster.post("/v1/responses", {**case["request"], "stream": False})
    assert status == 200
    check_response(body, case["expected"])
