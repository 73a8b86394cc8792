"""Outputs of a choice as a response."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.choice_text import TokenText
from kvbus_frontend.core.outputs import ChoiceOutput, Finish
from kvbus_frontend.core.responses_output import ResponsesOutput, ResponseStyle, failure_code
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols import ApiError, InvalidRequest
from kvbus_protocols.generation import Usage
from kvbus_protocols.responses.response import Reasoning as ReasoningEcho
from kvbus_protocols.responses.response import Response
from kvbus_protocols.responses.response import Text as TextEcho
from kvbus_protocols.responses.tools import Callee
from kvbus_testkit.responses import check_schema, check_stream, parse_events
from kvbus_wire.frontend import TokenLogprob

USAGE = Usage.of(prompt_tokens=10, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
BLANK = Response(
    id="resp_" + "a" * 48,
    created_at=100,
    status="in_progress",
    background=False,
    instructions=None,
    max_output_tokens=None,
    max_tool_calls=None,
    model="m",
    parallel_tool_calls=True,
    previous_response_id=None,
    prompt_cache_key=None,
    reasoning=ReasoningEcho(),
    safety_identifier=None,
    service_tier="default",
    store=True,
    temperature=1.0,
    text=TextEcho({"type": "text"}),
    tool_choice="auto",
    tools=[],
    top_logprobs=0,
    top_p=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    truncation="disabled",
    metadata={},
)
CALLEES = {
    "spawn": Callee("spawn", "agents"),
    "b__find": Callee("find", "b"),
    "apply_patch": Callee("apply_patch", kind="custom"),
    "tool_search": Callee("tool_search", kind="search"),
}


def output(**style: Any) -> ResponsesOutput:
    return ResponsesOutput(BLANK, ResponseStyle(callees=CALLEES, now=lambda: 105.9, **style))


def call(name: str, *arguments: str, index: int = 0) -> list[Event]:
    whole = "".join(arguments)
    pieces = [CallArguments(index, piece) for piece in arguments]
    return [CallStarted(index, f"call_{index}", name), *pieces, CallEnded(index, f"call_{index}", name, whole or "{}")]


def streamed(made: ResponsesOutput, events: Sequence[Event], finish: str = "stop") -> list[dict[str, Any]]:
    """One event of the parser per step."""
    data = [*made.opening(USAGE)]
    for event in events:
        data += made.chunks([ChoiceOutput(0, (event,))])
    data += made.chunks([ChoiceOutput(0, (), (), Finish(finish))])
    data += made.closing(USAGE)
    assert data[-1] == b"data: [DONE]\n\n"
    assert all(piece.endswith(b"\n\n") for piece in data)
    return parse_events(b"".join(data))


def names(events: list[dict[str, Any]]) -> list[str]:
    """Short names with the output index; deltas in a row once."""
    listed = [
        event["type"].removeprefix("response.") + (f":{event['output_index']}" if "output_index" in event else "")
        for event in events
    ]
    return [name for i, name in enumerate(listed) if i == 0 or name != listed[i - 1] or ".delta" not in name]


def test_the_life_of_a_message() -> None:
    events = streamed(output(), [Text("Three, "), Text("two.")])
    assert names(events) == [
        "created", "in_progress", "output_item.added:0", "content_part.added:0", "output_text.delta:0", "output_text.done:0",
        "content_part.done:0", "output_item.done:0", "completed",
    ]  # fmt: skip
    final = check_stream(events)
    assert final["output"] == [
        {
            "id": "msg_" + "a" * 48 + "0000",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Three, two.", "annotations": [], "logprobs": []}],
        }
    ]
    assert (final["status"], final["completed_at"], final["incomplete_details"], final["error"]) == (
        "completed",
        105,
        None,
        None,
    )
    assert final["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_thought_call_thought_call_and_text_are_five_items_in_order() -> None:
    events = streamed(
        output(),
        [
            Reasoning("a"), ReasoningEnded(), *call("f", '{"x"', ": 1}"), Reasoning("b"), ReasoningEnded(),
            *call("spawn", index=1), Text("done"),
        ],
    )  # fmt: skip
    final = check_stream(events)
    assert [item["type"] for item in final["output"]] == [
        "reasoning", "function_call", "reasoning", "function_call", "message",
    ]  # fmt: skip
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "a"}]
    assert "encrypted_content" not in final["output"][0]
    assert final["output"][0]["summary"] == []
    assert final["output"][1]["arguments"] == '{"x": 1}'
    assert "namespace" not in final["output"][1]
    assert (final["output"][3]["name"], final["output"][3]["namespace"]) == ("spawn", "agents")
    assert final["output"][3]["arguments"] == "{}"


def test_a_call_is_announced_with_its_last_character() -> None:
    made = output()
    list(made.opening(USAGE))
    events = parse_events(b"".join(made.chunks([ChoiceOutput(0, tuple(call("f", "{}")))])))
    assert names(events) == [
        "output_item.added:0", "function_call_arguments.delta:0", "function_call_arguments.done:0", "output_item.done:0",
    ]  # fmt: skip
    assert events[2]["name"] == "f"


def test_a_qualified_name_goes_back_to_name_and_namespace() -> None:
    final = check_stream(streamed(output(), call("b__find", "{}")))
    assert (final["output"][0]["name"], final["output"][0]["namespace"]) == ("find", "b")


def test_a_custom_call_streams_its_text_without_the_json_around_it() -> None:
    events = streamed(output(), call("apply_patch", '{"inp', 'ut": "*** Be', "gin\\n", '+x"}'))
    final = check_stream(events)
    assert final["output"][0] | {"id": ""} == {
        "id": "", "type": "custom_tool_call", "status": "completed", "call_id": "call_0", "name": "apply_patch",
        "input": "*** Begin\n+x",
    }  # fmt: skip
    assert [e["delta"] for e in events if e["type"].endswith("input.delta")] == ["*** Be", "gin\n", "+x"]


def test_a_search_for_tools_has_its_arguments_as_an_object() -> None:
    final = check_stream(streamed(output(), call("tool_search", '{"query": "mail"}')))
    assert final["output"][0] | {"id": ""} == {
        "id": "", "type": "tool_search_call", "status": "completed", "call_id": "call_0", "execution": "client",
        "arguments": {"query": "mail"},
    }  # fmt: skip


def test_a_thought_can_come_as_its_own_summary_and_sealed() -> None:
    made = output(summary=True, seal=lambda text: f"sealed({text})")
    events = streamed(made, [Reasoning("hm"), Reasoning("!"), ReasoningEnded(), Text("x")])
    final = check_stream(events)
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "hm!"}]
    assert final["output"][0]["encrypted_content"] == "sealed(hm!)"
    assert names(events)[2:13] == [
        "output_item.added:0", "content_part.added:0", "reasoning_summary_part.added:0", "reasoning_text.delta:0",
        "reasoning_summary_text.delta:0", "reasoning_text.delta:0", "reasoning_summary_text.delta:0", "reasoning_text.done:0",
        "content_part.done:0", "reasoning_summary_text.done:0", "reasoning_summary_part.done:0",
    ]  # fmt: skip


def test_text_cut_by_the_token_limit_is_incomplete() -> None:
    events = streamed(output(), [Text("Three")], "length")
    final = check_stream(events)
    assert names(events)[-2:] == ["output_item.done:0", "incomplete"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["completed_at"] is None
    assert final["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("name", ["f", "apply_patch", "tool_search"])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_cut_call_is_never_announced_as_done(name: str, finish: str) -> None:
    events = streamed(output(), call(name, '{"input": "rm')[:-1], finish)
    final = check_stream(events)
    assert final["output"][0]["status"] == "incomplete"
    assert not [event for event in events if "done" in event["type"]]
    assert final["status"] == ("incomplete" if finish == "length" else "completed")


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    final = check_stream(streamed(output(), []))
    assert final["output"][0]["content"][0]["text"] == ""


def test_a_failure_keeps_what_came_before_it() -> None:
    made = output()
    data = [*made.opening(USAGE), *made.chunks([ChoiceOutput(0, (*call("f", "{}"), Text("par")))])]
    data += made.failure(ApiError(503, "No worker is left.", code="no_workers"))
    final = check_stream(parse_events(b"".join(data)))
    assert (final["status"], final["error"]) == ("failed", {"code": "server_error", "message": "No worker is left."})
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]
    assert final["usage"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x", code="context_length_exceeded"), "context_length_exceeded"),
        (InvalidRequest("x", code="other"), "invalid_prompt"),
        (ApiError(429, "x"), "rate_limit_exceeded"),
        (ApiError(499, "x", code="slow_client"), "server_error"),
        (ApiError(500, "x"), "server_error"),
    ],
)
def test_failures_have_the_codes_that_clients_act_upon(error: ApiError, code: str) -> None:
    assert failure_code(error) == code


def test_a_queued_response_opens_once() -> None:
    made = output()
    data = [*made.queued(), *made.opening(USAGE), *made.chunks([ChoiceOutput(0, (Text("x"),))]), *made.cancelled()]
    events = parse_events(b"".join(data))
    assert names(events)[:3] == ["created", "queued", "in_progress"]
    assert check_stream(events)["status"] == "cancelled"


def test_keep_alives_are_events_that_say_nothing_new() -> None:
    made = output()
    data = [*made.opening(USAGE), made.keep_alive(), *made.chunks([ChoiceOutput(0, (Text("x"),), (), Finish("stop"))])]
    events = parse_events(b"".join([*data, made.keep_alive(), *made.closing(USAGE)]))
    check_stream(events)
    kept_alive = [event for event in events if event["type"] == "response.in_progress"]
    assert len(kept_alive) == 3
    assert all(event["response"] == kept_alive[0]["response"] for event in kept_alive)


def test_log_probabilities_come_with_the_text() -> None:
    made = output(token_bytes=lambda token: bytes([token]))
    tokens = tuple(
        TokenText(i, TokenLogprob(token, -0.5, ((token, -0.5), (98, float("-inf"))))) for i, token in enumerate(b"hi")
    )
    data = [*made.opening(USAGE), *made.chunks([ChoiceOutput(0, (Text("hi"),), tokens, Finish("stop"))])]
    final = check_stream(parse_events(b"".join([*data, *made.closing(USAGE)])))
    assert final["output"][0]["content"][0]["logprobs"][1] == {
        "token": "i",
        "logprob": -0.5,
        "bytes": [105],
        "top_logprobs": [
            {"token": "i", "logprob": -0.5, "bytes": [105]},
            {"token": "b", "logprob": -9999.0, "bytes": [98]},
        ],
    }


SEGMENTS = st.one_of(
    st.text(min_size=1).map(lambda text: [Text(text)]),
    st.text(min_size=1).map(lambda text: [Reasoning(text), ReasoningEnded()]),
    st.sampled_from(["f", "spawn", "apply_patch", "tool_search", "unknown"]).map(
        lambda name: call(name, '{"input"', ': "x"}')
    ),
)


@given(st.lists(SEGMENTS, max_size=8), st.sampled_from(["stop", "length"]), st.integers(0, 2))
def test_the_stream_ends_in_the_response_that_is_not_streamed(
    segments: list[list[Event]], finish: str, missing: int
) -> None:
    events = [event for segment in segments for event in segment]
    events = events[: max(0, len(events) - missing)]
    whole = output().body([ChoiceOutput(0, tuple(events), (), Finish(finish))], USAGE)
    plain = msgspec.json.decode(msgspec.json.encode(whole))
    check_schema("Response", plain)
    assert check_stream(streamed(output(), events, finish)) == plain
