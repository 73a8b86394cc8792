"""Checks of Responses requests."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols import InvalidRequest, RequestDecoder
from kvbus_protocols.responses.request import CompactRequest, ResponsesRequest

ECHO = {"type": "function", "name": "echo", "parameters": {"type": "object"}, "strict": None}
SPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "inner"}]}


def decoded(**fields: Any) -> ResponsesRequest:
    return RequestDecoder(ResponsesRequest).decode(msgspec.json.encode({"model": "m", "input": "x", **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "", "max_output_tokens": 1},
        {"input": None, "previous_response_id": "resp_1"},
        {"input": [], "previous_response_id": "resp_1"},
        {"store": None, "metadata": None, "include": None, "tools": None, "text": None, "reasoning": None},
        {"include": ["reasoning.encrypted_content", "something.new"], "store": False},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
        {"tools": [ECHO, SPACE, {"type": "web_search"}], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [SPACE], "tool_choice": {"type": "function", "name": "inner"}},
        {"tools": [SPACE], "tool_choice": {"type": "function", "name": "inner", "namespace": "n"}},
        {"tools": [], "input": [{"type": "additional_tools", "tools": [ECHO]}], "tool_choice": "required"},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"reasoning": {"effort": "xhigh", "summary": "auto", "context": "all_turns"}},
        {"background": True},
        {"truncation": "auto", "max_tool_calls": 3, "service_tier": "flex", "user": "u", "safety_identifier": "s"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"client_metadata": {"a": 1}, "context_management": [{"type": "compaction"}], "prompt_cache_key": "k"},
    ],
)
def test_a_request_that_must_work_passes(fields: dict[str, Any]) -> None:
    decoded(**fields).check()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"temperature": 3.0}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "rhymed"}}, "reasoning.summary"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {f"k{i}": "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 64),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"name": "echo"}]}, "tools[0].type"),
        ({"tools": [ECHO], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ECHO], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [ECHO], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [ECHO], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "inner", "namespace": "m"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "o"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decoded(**fields).check()
    assert refusal.value.param == param


def test_a_choice_without_tools_is_refused_in_the_words_that_clients_know() -> None:
    with pytest.raises(InvalidRequest, match=r"must be specified with 'tools' parameter\.$"):
        decoded(tool_choice="required").check()


def test_the_token_limit_has_two_names() -> None:
    assert decoded(max_output_tokens=5, max_tokens=7).token_limit == 5
    assert decoded(max_tokens=7).token_limit == 7
    assert decoded().token_limit is None


def test_log_probabilities_come_when_they_are_included() -> None:
    assert decoded().logprob_count is None
    assert decoded(include=["message.output_text.logprobs"]).logprob_count == 0
    assert decoded(top_logprobs=4).logprob_count == 4


def test_thoughts_are_sealed_when_asked_for_and_when_nothing_is_stored() -> None:
    assert not decoded().wants_encrypted_reasoning
    assert decoded(store=False).wants_encrypted_reasoning
    assert decoded(include=["reasoning.encrypted_content"]).wants_encrypted_reasoning


def test_compacting_needs_a_model_and_something_to_compact() -> None:
    decoder = RequestDecoder(CompactRequest)
    with pytest.raises(InvalidRequest) as missing:
        decoder.decode(b'{"input": "x"}')
    assert missing.value.param == "model"
    with pytest.raises(InvalidRequest) as empty:
        decoder.decode(b'{"model": "m", "input": []}').check()
    assert empty.value.param == "input"


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"x-codex-turn-metadata": '{"request_kind":"turn"}', "session_id": "s"}, '{"request_kind":"turn"}'),
        ({"x-codex-turn-metadata": {"request_kind": "turn"}}, None),
        ({}, None),
        (["x"], None),
        (None, None),
        (7, None),
    ],
)
def test_what_a_client_says_besides_is_taken_whatever_it_is(metadata: Any, found: str | None) -> None:
    assert decoded(client_metadata=metadata).turn_metadata == found
