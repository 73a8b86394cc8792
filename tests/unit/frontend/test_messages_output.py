"""Outputs as answers of the Messages API."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.messages_output import MessagesOutput
from kvbus_frontend.core.outputs import ChoiceOutput, Finish
from kvbus_frontend.core.retention import Lease
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols import ApiError
from kvbus_protocols.generation import Usage
from kvbus_protocols.messages_echo import call_id_of, signed_thought

USAGE = Usage.of(prompt_tokens=10, completion_tokens=5)
STOP = Finish("stop")


def call(index: int, *pieces: str, name: str = "f", call_id: str = "c") -> list[Event]:
    arguments = "".join(pieces)
    started = CallStarted(index, f"{call_id}{index}", name)
    deltas = [CallArguments(index, piece) for piece in pieces]
    return [started, *deltas, CallEnded(index, f"{call_id}{index}", name, arguments or "{}")]


def cut_call(index: int, *pieces: str) -> list[Event]:
    return [CallStarted(index, f"c{index}", "f"), *(CallArguments(index, piece) for piece in pieces)]


def parsed(events: Sequence[bytes]) -> list[dict[str, Any]]:
    """Every event's name is its type, and it ends with a blank line."""
    found = []
    for event in events:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def streamed(*events: Event, finish: Finish = STOP, usage: Usage = USAGE, kept: int = 0) -> list[dict[str, Any]]:
    """Each event in an output of its own."""
    output = MessagesOutput("msg_1", "m", leases=[Lease(kept, 300.0)] if kept else ())
    outputs = [*(ChoiceOutput(0, (event,)) for event in events), ChoiceOutput(0, finish=finish)]
    return parsed([*output.opening(usage), *output.chunks(outputs), *output.closing(usage)])


def whole(*events: Event, finish: Finish = STOP, usage: Usage = USAGE, kept: int = 0) -> dict[str, Any]:
    output = MessagesOutput("msg_1", "m", leases=[Lease(kept, 300.0)] if kept else ())
    body: dict[str, Any] = json.loads(msgspec.json.encode(output.body([ChoiceOutput(0, events, finish=finish)], usage)))
    return body


def outline(events: Sequence[dict[str, Any]]) -> list[str]:
    """``name:index:kind``"""
    lines = []
    for event in events:
        inner = event.get("content_block") or event.get("delta") or {}
        parts = [event["type"], str(event.get("index", "")), inner.get("type", "")]
        lines.append(":".join(part for part in parts if part))
    return lines


def test_thoughts_words_and_calls_are_blocks_one_after_the_other() -> None:
    events = streamed(
        Reasoning("Need "), Reasoning("it."), ReasoningEnded(), Text("Looking."), *call(0, '{"a":', " 1}"), *call(1, "{}")
    )  # fmt: skip
    assert outline(events) == [
        "message_start",
        "content_block_start:0:thinking",
        "content_block_delta:0:thinking_delta",
        "content_block_delta:0:thinking_delta",
        "content_block_delta:0:signature_delta",
        "content_block_stop:0",
        "content_block_start:1:text",
        "content_block_delta:1:text_delta",
        "content_block_stop:1",
        "content_block_start:2:tool_use",
        "content_block_delta:2:input_json_delta",
        "content_block_delta:2:input_json_delta",
        "content_block_stop:2",
        "content_block_start:3:tool_use",
        "content_block_delta:3:input_json_delta",
        "content_block_stop:3",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": ""}
    assert starts[2].pop("id") != starts[3]["id"]
    assert starts[2] == {"type": "tool_use", "name": "f", "input": {}}


def test_the_first_event_is_a_whole_message_without_content() -> None:
    usage = Usage.of(prompt_tokens=10, completion_tokens=0, cached_tokens=4)
    first = parsed(list(MessagesOutput("msg_1", "m").opening(usage)))
    assert first == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
                "stop_reason": None, "stop_sequence": None,
                "usage": {
                    "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 0,
                },
            },
        }
    ]  # fmt: skip


def test_a_block_of_a_call_ends_with_the_call_and_not_with_what_follows() -> None:
    output = MessagesOutput("msg_1", "m")
    events = parsed(list(output.chunks([ChoiceOutput(0, tuple(call(0, "{}")))])))
    assert outline(events)[-1] == "content_block_stop:0"


def test_interleaved_thoughts_have_blocks_and_signatures_of_their_own() -> None:
    given: list[Event] = [
        Reasoning("a"), ReasoningEnded(), *call(0, "{}"), Reasoning("b"), ReasoningEnded(), *call(1, "{}"), Text("c"), Text("d")
    ]  # fmt: skip
    blocks = whole(*given)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use", "thinking", "tool_use", "text"]
    assert [signed_thought(block["signature"]) for block in blocks if "signature" in block] == ["a", "b"]
    assert blocks[-1] == {"type": "text", "text": "cd"}


def test_a_thought_that_never_ended_is_signed_all_the_same() -> None:
    events = streamed(Reasoning("a"), finish=Finish("length"))
    assert outline(events)[1:4] == [
        "content_block_start:0:thinking",
        "content_block_delta:0:thinking_delta",
        "content_block_delta:0:signature_delta",
    ]
    assert signed_thought(events[3]["delta"]["signature"]) == "a"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_ids_are_in_the_form_of_the_api_and_hold_the_models_own() -> None:
    (block,) = whole(*call(0, "{}", call_id="functions.f:"))["content"]
    assert block["id"].startswith("toolu_")
    assert call_id_of(block["id"]) == "functions.f:0"


def test_no_text_is_no_block() -> None:
    assert outline(streamed(Text(""), Reasoning(""), ReasoningEnded())) == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert whole()["content"] == []


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1.50, "b": 123456789012345678901234567890}', '{"a": 1.50, "b": 123456789012345678901234567890}'),
        ('{\n  "a": "x"\n}', '{\n  "a": "x"\n}'),
        ("", "{}"),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("[1]", '{"INVALID_JSON": "[1]"}'),
        ("Paris", '{"INVALID_JSON": "Paris"}'),
        ('{"port": }', '{"INVALID_JSON": "{\\"port\\": }"}'),
        ('{"a": 1, b', '{"a": 1, "INVALID_JSON": "{\\"a\\": 1, b"}'),
        ('{"a": 1}}', '{"a": 1, "INVALID_JSON": "{\\"a\\": 1}}"}'),
        ('{"a": NaN}', '{"INVALID_JSON": "{\\"a\\": NaN}"}'),
        ('{"a": "two\nlines"}', r'{"a": "two\nlines"}'),
        (r'{"a": "\ud83d"}', r'{"a": "\ud83d"}'),
    ],
)
def test_the_input_of_a_call_is_what_the_model_wrote_or_shows_that_it_is_no_object(arguments: str, found: str) -> None:
    events = call(0, *([arguments] if arguments else []))
    body = MessagesOutput("msg_1", "m").body([ChoiceOutput(0, tuple(events), finish=STOP)], USAGE)
    assert f'"input":{found}}}'.encode() in msgspec.json.encode(body)
    deltas = [e["delta"] for e in streamed(*events) if e["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == found


def test_a_call_without_arguments_has_an_empty_object_in_its_deltas() -> None:
    events = streamed(*call(0))
    assert [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"] == ["{}"]


def test_a_cut_call_stays_partial_in_the_stream_and_gives_its_parsed_part_in_the_body() -> None:
    given = cut_call(0, '{"a": "x", ', '"b": "unfin')
    events = streamed(*given, finish=Finish("length"))
    assert outline(events)[-3:] == ["content_block_stop:0", "message_delta", "message_stop"]
    written = "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert written == '{"a": "x", "b": "unfin'
    body = whole(*given, finish=Finish("length"))
    assert (body["content"][0]["input"], body["stop_reason"]) == ({"a": "x"}, "max_tokens")


@pytest.mark.parametrize(
    ("events", "finish", "stop"),
    [
        ([Text("x")], STOP, ("end_turn", None)),
        ([Text("x")], Finish("stop", 17), ("end_turn", None)),
        ([Text("x")], Finish("stop", "END"), ("stop_sequence", "END")),
        ([Text("x")], Finish("length"), ("max_tokens", None)),
        (call(0, "{}"), STOP, ("tool_use", None)),
        (call(0, "{}"), Finish("length"), ("max_tokens", None)),
        (cut_call(0, "{"), STOP, ("end_turn", None)),
        ([*call(0, "{}"), *cut_call(1, "{")], STOP, ("tool_use", None)),
    ],
)
def test_stop_reasons(events: list[Event], finish: Finish, stop: tuple[str, str | None]) -> None:
    body = whole(*events, finish=finish)
    assert (body["stop_reason"], body["stop_sequence"]) == stop
    assert streamed(*events, finish=finish)[-2]["delta"] == {"stop_reason": stop[0], "stop_sequence": stop[1]}


@pytest.mark.parametrize(
    ("cached", "kept", "counts"),
    [(0, 0, (100, 0, 0)), (40, 0, (60, 0, 40)), (40, 90, (10, 50, 40)), (96, 90, (4, 0, 96)), (0, 500, (0, 100, 0))],
)
def test_the_kinds_of_prompt_tokens_add_up_to_the_prompt(cached: int, kept: int, counts: tuple[int, int, int]) -> None:
    usage = Usage.of(prompt_tokens=100, completion_tokens=7, cached_tokens=cached, reasoning_tokens=3)
    expected: dict[str, Any] = {
        "input_tokens": counts[0],
        "cache_creation_input_tokens": counts[1],
        "cache_read_input_tokens": counts[2],
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 3},
    }
    if kept:
        expected["cache_creation"] = {"ephemeral_5m_input_tokens": counts[1], "ephemeral_1h_input_tokens": 0}
    assert whole(Text("x"), usage=usage, kept=kept)["usage"] == expected
    assert streamed(Text("x"), usage=usage, kept=kept)[-2]["usage"] == expected


def test_what_could_not_be_kept_is_told_and_does_not_count_as_written() -> None:
    usage = Usage.of(prompt_tokens=100, completion_tokens=7, unpinned_tokens=32)
    found = whole(Text("x"), usage=usage, kept=96)["usage"]
    assert (found["unpinned_tokens"], found["cache_creation_input_tokens"], found["input_tokens"]) == (32, 64, 36)


def test_an_error_ends_the_stream_by_an_event_of_its_own() -> None:
    output = MessagesOutput("msg_1", "m")
    list(output.chunks([ChoiceOutput(0, (Text("x"),))]))
    events = parsed(list(output.failure(ApiError(503, "no worker is left", code="no_workers"))))
    assert events == [
        {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "Overloaded: no worker is left"},
            "request_id": "msg_1",
        }
    ]


def test_silence_is_filled_with_pings() -> None:
    assert MessagesOutput("msg_1", "m").keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
