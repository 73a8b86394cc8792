"""Turns in the shape that chat templates expect."""

from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.conversation import template_messages, template_tools
from kvbus_protocols.chat import ChatMessage, Tool
from kvbus_protocols.chat_turns import chat_tools, chat_turns
from kvbus_protocols.conversation import CUSTOM_SCHEMA, ToolCallPart, ToolSpec, Turn


def shaped(message: dict[str, Any], *, argument_strings: bool = False) -> dict[str, Any]:
    turns = chat_turns([msgspec.convert(message, ChatMessage)])
    return template_messages(turns, argument_strings=argument_strings)[0]


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"), ([], "")],
)
def test_content_is_one_text(content: Any, text: str) -> None:
    assert shaped({"role": "user", "content": content}) == {"role": "user", "content": text}


def test_a_developer_is_the_system() -> None:
    assert shaped({"role": "developer", "content": "x"})["role"] == "system"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_under_the_name_that_templates_read(field: str) -> None:
    assert shaped({"role": "assistant", "content": "x", field: "why"})["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_string"),
    [
        ('{"b": 1,  "a": 2}', {"b": 1, "a": 2}, '{"b": 1,  "a": 2}'),
        ("", {}, {}),
        (None, {}, {}),
        ({"a": 1}, {"a": 1}, '{"a":1}'),
        ('{"a": "unterminated', '{"a": "unterminated', '{"a": "unterminated'),
    ],
)
def test_arguments_are_what_the_template_takes(arguments: Any, as_object: Any, as_string: Any) -> None:
    assert shaped(call(arguments))["tool_calls"][0]["function"]["arguments"] == as_object
    assert shaped(call(arguments), argument_strings=True)["tool_calls"][0]["function"]["arguments"] == as_string


def test_a_tool_result_keeps_its_call() -> None:
    assert shaped({"role": "tool", "tool_call_id": "c1", "name": "f", "content": "r"}) == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "f",
        "content": "r",
    }


def test_tools_keep_their_schema_in_its_order_and_lose_wishes_to_the_server() -> None:
    parameters = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    shaped_tools = template_tools(chat_tools([msgspec.convert(tool, Tool)]))
    assert shaped_tools == [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert shaped_tools is not None
    assert list(shaped_tools[0]["function"]["parameters"]["properties"]) == ["z", "a"]
    assert template_tools([]) is None


def test_the_text_of_a_custom_call_travels_as_the_one_argument() -> None:
    turns = (Turn("assistant", (ToolCallPart("c", "patch", 'say "hi"', custom=True),)),)
    as_object, as_string = (
        template_messages(turns, argument_strings=strings)[0]["tool_calls"][0]["function"]["arguments"]
        for strings in (False, True)
    )
    assert as_object == {"input": 'say "hi"'}
    assert as_string == '{"input":"say \\"hi\\""}'


def test_tools_that_the_conversation_itself_shows_are_not_at_the_top() -> None:
    custom = ToolSpec(name="patch", custom=True)
    assert template_tools([custom, ToolSpec(name="found", deferred=True)]) == [
        {"type": "function", "function": {"name": "patch", "parameters": CUSTOM_SCHEMA}}
    ]
