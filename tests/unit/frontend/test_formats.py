"""Which parsers an output gets: what the worker says, what the template tells, what the request is about."""

import json
from typing import Any

import pytest

from kvbus_frontend.core.formats import (
    Formats,
    chosen_formats,
    parser_for,
    prompt_reasoning,
    told_formats,
    unknown_parsers,
)
from kvbus_parsers import CallEnded, Parser, Reasoning, Text
from kvbus_protocols.conversation import (
    Conversation,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
    Turn,
)
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import ModelBundle, byte_level_bundle, load_template, load_tokenizer
from kvbus_wire.records import ModelCard

CALL = '<tool_call>\n{"name": "f", "arguments": {"n": "1"}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
TOOL = ToolSpec(name="f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
USER = Turn("user", (TextPart("hi"),))
CALLED = Turn("assistant", (ToolCallPart("c", "f", "{}"),))
RESULT = Turn("tool", (ToolResultPart("c", (TextPart("1"),)),))
BOTH = Formats("hermes", "qwen3")


def conversation(*turns: Turn, **fields: Any) -> Conversation:
    return Conversation(generation=GenerationRequest(model="m"), turns=turns or (USER,), **fields)


def parser(given: Conversation, formats: Formats = BOTH, tail: str = "", mode: str = "auto") -> Parser:
    found = parser_for(given, formats, tail, mode)
    assert found is not None
    return found


def said(given: Parser, output: str) -> dict[str, Any]:
    events = [*given.feed(output), *given.finish("stop")]
    return {
        "text": "".join(event.text for event in events if isinstance(event, Text)),
        "thoughts": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "calls": [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEnded)],
    }


def told(template: str, config: Any = None) -> Formats:
    bundle = byte_level_bundle(chat_template=template)
    if config is not None:
        bundle = ModelBundle({**bundle.files, "config.json": json.dumps(config).encode()})
    return told_formats(load_template(bundle, load_tokenizer(bundle)), bundle)


def test_a_template_tells_the_formats() -> None:
    template = "{{ '<tool_call>\n<function=' }}{{ messages }}{{ '<think></think>' }}"
    assert told(template) == Formats("qwen3_coder", "qwen3")
    assert told("{{ messages }}") == Formats()


@pytest.mark.parametrize("config", [{}, {"model_type": 7}, [], None])
def test_a_config_that_tells_nothing_does_no_harm(config: Any) -> None:
    assert told("{{ messages }}", config) == Formats()


def test_without_a_template_nothing_is_told() -> None:
    assert told_formats(None, byte_level_bundle()) == Formats()


def card(tool: str, reasoning: str) -> ModelCard:
    return ModelCard(
        name="m", fingerprint="f", block_size=4, context_length=100, bundle="b", kv_layout="l",
        tool_call_parser=tool, reasoning_parser=reasoning,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "reasoning", "found"),
    [
        ("auto", "auto", BOTH),
        ("none", "auto", Formats(None, "qwen3")),
        ("auto", "none", Formats("hermes", None)),
        ("qwen3_coder", "deepseek_r1", Formats("qwen3_coder", "deepseek_r1")),
        ("Qwen3-Coder", "none", Formats("Qwen3-Coder", None)),
    ],
)
def test_what_the_worker_says_comes_first(tool: str, reasoning: str, found: Formats) -> None:
    assert chosen_formats(card(tool, reasoning), BOTH) == found
    assert unknown_parsers(card(tool, reasoning)) == ()


def test_a_name_that_only_a_newer_release_knows_counts_as_auto() -> None:
    newer = card("qwen9", "qwen3")
    assert unknown_parsers(newer) == ("qwen9",)
    assert chosen_formats(newer, BOTH) == BOTH
    assert chosen_formats(card("auto", "qwen9_thoughts"), Formats()) == Formats()


def test_without_formats_all_is_text() -> None:
    assert parser_for(conversation(), Formats(), "", "auto") is None
    assert parser_for(conversation(tools=(TOOL,)), Formats(), "", "auto") is None
    assert parser_for(conversation(), Formats(tool="hermes"), "", "auto") is None, "no tools, no calls"


def test_calls_are_read_where_tools_are_offered() -> None:
    assert said(parser(conversation(tools=(TOOL,))), CALL) == {
        "text": "",
        "thoughts": "",
        "calls": [("f", {"n": "1"})],
    }
    assert said(parser(conversation()), CALL)["text"] == CALL


def test_arguments_get_the_types_of_the_schema() -> None:
    found = said(parser(conversation(tools=(TOOL,)), Formats(tool="qwen3_coder")), CODER_CALL)
    assert found["calls"] == [("f", {"n": 1})]


@pytest.mark.parametrize(
    "given",
    [
        conversation(tools=(TOOL,), tool_choice=ToolChoice("none")),
        conversation(USER, CALLED, RESULT),
    ],
    ids=["tool choice none", "calls in the history but no tools"],
)
def test_calls_that_nobody_may_make_vanish(given: Conversation) -> None:
    assert said(parser(given), f"before {CALL} after") == {"text": "before after", "thoughts": "", "calls": []}


def test_forced_calls_are_read_without_a_format() -> None:
    given = conversation(tools=(TOOL,), tool_choice=ToolChoice("required"))
    assert said(parser(given, Formats(), mode="guided_array"), '[{"name": "f", "parameters": {}}]')["calls"] == [
        ("f", {})
    ]
    assert said(parser(given, mode="guided_array"), CALL)["calls"] == [("f", {"n": "1"})], "the model's own form"


def test_a_forced_call_is_forbidden_by_the_history_alone() -> None:
    """A request cannot force calls without tools; what it finds in its history changes nothing about that."""
    found = said(parser(conversation(USER, CALLED, RESULT), mode="guided_array"), '[{"name": "f", "parameters": {}}]')
    assert found["calls"] == []


@pytest.mark.parametrize(
    ("tail", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n", None),
    ],
)
def test_the_end_of_the_prompt_tells_whether_a_thought_is_open(tail: str, is_open: bool | None) -> None:
    assert prompt_reasoning(conversation(), "qwen3", tail) is is_open
    found = said(parser(conversation(), tail=tail), "a</think>b")
    assert found["thoughts"] == ("a" if is_open else "")


@pytest.mark.parametrize(
    ("begun", "is_open"),
    [("<think>\nso", True), ("<think>\nso\n</think>\n\nIt", False), ("It is", False), ("The tag <think> is", False)],
)
def test_an_answer_that_the_client_has_begun_tells_it_by_itself(begun: str, is_open: bool) -> None:
    given = conversation(USER, Turn("assistant", (TextPart(begun),)), continue_final=True)
    assert prompt_reasoning(given, "qwen3", "<think>\n") is is_open


def test_a_model_without_thoughts_has_none_open() -> None:
    assert prompt_reasoning(conversation(), None, "<think>\n") is None
