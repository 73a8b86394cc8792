"""Checks of requests that the types alone cannot express."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols import ApiError, InvalidRequest, context_length_exceeded, model_not_found
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.chat_turns import chat_conversation
from kvbus_protocols.completions import CompletionRequest
from kvbus_protocols.conversation import ReasoningPart, TextPart
from kvbus_protocols.tokenization import TokenizeRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"model": "m", "prompt": "x", **fields}, CompletionRequest)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "x"},
        {"stop": ["a", "b", "c", "d"]},
        {"stop": []},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 5},
        {"logprobs": True},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
            ]
        },
        {"messages": [{"role": "tool", "tool_call_id": "nowhere", "content": [{"type": "text", "text": "a"}]}]},
        {"nvext": {"agent_hints": {"priority": 5}, "annotations": ["request_id"]}},
        {"kvbus": {"mock": {"output": "x", "finish": "length", "chunks": ["x"]}, "session": {"id": "s"}}},
    ],
)
def test_a_chat_request_that_must_work_passes(fields: dict[str, Any]) -> None:
    chat(**fields).check()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"kvbus": {"mock": {"finish": "maybe"}}}, "kvbus.mock.finish"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_chat_request_that_makes_no_sense_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        msgspec.convert(
            {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest, strict=False
        ).check()
    assert refusal.value.param == param


def test_the_newer_token_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=5).token_limit == 5
    assert chat().token_limit is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_them(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], ["a", [1]], [1, [1]], [-1], [2**32]])
def test_a_mixed_or_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        _ = completion(prompt=prompt).prompts


@pytest.mark.parametrize(
    ("fields", "param"), [({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"best_of": 1, "n": 2}, "best_of")]
)
def test_what_completions_do_not_support_is_said_clearly(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**fields).check()
    assert (refusal.value.param, refusal.value.code) == (param, "unsupported")


@pytest.mark.parametrize("fields", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_wants_either_a_prompt_or_messages(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        msgspec.convert({"model": "m", **fields}, TokenizeRequest).check()


def test_an_error_has_the_shape_and_words_that_clients_look_for() -> None:
    error = context_length_exceeded(limit=100, prompt_tokens=120, completion_tokens=16, param="messages")
    assert error.code == "context_length_exceeded"
    assert error.message.startswith(
        "This model's maximum context length is 100 tokens. However, you requested 136 tokens "
        "(120 in the messages, 16 in the completion)."
    )
    assert msgspec.to_builtins(model_not_found("x").body) == {
        "error": {
            "message": "The model `x` does not exist.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    assert ApiError(503, "busy", retry_after_s=1.2).headers == {"Retry-After": "2"}
    assert ApiError(503, "busy", retry_after_s=0.0).headers == {"Retry-After": "1"}


def test_whoever_is_to_come_back_is_told_when() -> None:
    assert [ApiError(status, "busy").headers for status in (429, 503, 529)] == [{"Retry-After": "1"}] * 3
    assert ApiError(500, "broken").headers == ApiError(400, "wrong").headers == {}
    assert ApiError(500, "broken").headers == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"reasoning_content": "", "reasoning": "why"},
        {"reasoning_content": "why", "reasoning": "why"},
    ],
)
def test_a_thought_is_read_back_from_either_field(fields: dict[str, str]) -> None:
    request = chat(messages=[{"role": "assistant", "content": "So.", **fields}])
    assert chat_conversation(request).turns[0].parts == (ReasoningPart("why"), TextPart("So."))
