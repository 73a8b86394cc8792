"""Turns in the shape that chat templates expect."""

from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.conversation import template_messages, template_tools
from kvbus_frontend.core.formats import Formats
from kvbus_frontend.core.message_style import MessageStyle, ThinkMarkers, style_of
from kvbus_frontend.core.template_traits import TemplateTraits
from kvbus_frontend.core.written_calls import WrittenCall
from kvbus_protocols.chat import ChatMessage, Tool
from kvbus_protocols.chat_turns import chat_tools, chat_turns
from kvbus_protocols.conversation import (
    CUSTOM_SCHEMA,
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    Turn,
)
from kvbus_tokenizers import WrittenObject

FIELDS = TemplateTraits(fields=("reasoning_content",))
THINK = ThinkMarkers("<think>", "</think>")


def shaped(message: dict[str, Any], traits: TemplateTraits = FIELDS) -> dict[str, Any]:
    return template_messages(chat_turns([msgspec.convert(message, ChatMessage)]), MessageStyle(traits))[0]


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
def test_reasoning_is_put_where_the_template_reads_it(field: str) -> None:
    both = TemplateTraits(fields=("reasoning_content", "reasoning"))
    assert shaped({"role": "assistant", "content": "x", field: "why"}, both) == {
        "role": "assistant", "content": "x", "reasoning_content": "why", "reasoning": "why",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "values", "text"),
    [
        ('{"b": 1,  "a": 2}', {"b": 1, "a": 2}, '{"b": 1, "a": 2}'),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ({"a": 1}, {"a": 1}, '{"a": 1}'),
        ('{"a": "unterminated', {}, '{"a": "unterminated'),
        ("[1]", {}, "[1]"),
    ],
)
def test_arguments_are_an_object_in_the_canonical_form(arguments: Any, values: Any, text: str) -> None:
    given = shaped(call(arguments))["tool_calls"][0]["function"]["arguments"]
    assert isinstance(given, WrittenObject)
    assert (dict(given), str(given)) == (values, text)


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
    [message] = template_messages([said(ToolCallPart("c", "patch", 'say "hi"', custom=True))], MessageStyle())
    assert message["tool_calls"][0]["function"]["arguments"] == {"input": 'say "hi"'}


def test_tools_that_the_conversation_itself_shows_are_not_at_the_top() -> None:
    custom = ToolSpec(name="patch", custom=True)
    assert template_tools([custom, ToolSpec(name="found", deferred=True)]) == [
        {"type": "function", "function": {"name": "patch", "parameters": CUSTOM_SCHEMA}}
    ]


# the assistant's turns


def said(*parts: Part) -> Turn:
    return Turn("assistant", parts)


def results(*ids: str) -> Turn:
    return Turn("tool", tuple(ToolResultPart(i, (TextPart(f"result {i}"),)) for i in ids))


def brief(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is the same everywhere."""
    calls = {"calls": [c["function"]["name"] for c in message["tool_calls"]]} if "tool_calls" in message else {}
    kept = ("content", "reasoning_content", "thinking", "tool_call_id")
    return {key: message[key] for key in kept if key in message} | calls


def briefly(traits: TemplateTraits, *turns: Turn, markers: ThinkMarkers | None = THINK) -> list[dict[str, Any]]:
    return [brief(message) for message in template_messages(turns, MessageStyle(traits, markers))]


A, B = ToolCallPart("a", "fa", "{}"), ToolCallPart("b", "fb", "{}")
INTERLEAVED = said(ReasoningPart("one"), A, ReasoningPart("two"), TextPart("text"), B)


def test_a_thought_after_a_call_begins_a_message_of_its_own() -> None:
    assert briefly(FIELDS, INTERLEAVED, results("a", "b")) == [
        {"content": "", "reasoning_content": "one", "calls": ["fa"]},
        {"content": "text", "reasoning_content": "two", "calls": ["fb"]},
        {"content": "result a", "tool_call_id": "a"},
        {"content": "result b", "tool_call_id": "b"},
    ]


def test_where_messages_in_a_row_are_refused_they_are_one() -> None:
    assert briefly(TemplateTraits(fields=("reasoning_content",), successive=False), INTERLEAVED) == [
        {"content": "text", "reasoning_content": "one\n\ntwo", "calls": ["fa", "fb"]}
    ]


def test_thoughts_stand_in_the_text_in_their_order_where_the_template_reads_none() -> None:
    assert briefly(TemplateTraits(), said(ReasoningPart("one"), TextPart("text"), ReasoningPart("two"), A)) == [
        {"content": "<think>\none\n</think>\n\ntext<think>\ntwo\n</think>\n\n", "calls": ["fa"]}
    ]
    assert briefly(TemplateTraits(), INTERLEAVED)[1]["content"] == "<think>\ntwo\n</think>\n\ntext"


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ("mistral", "[THINK]why[/THINK]so"),
        ("gemma4", "<|channel>thought\nwhy\n<channel|>so"),
        ("kimi", "◁think▷why◁/think▷so"),
        ("deepseek_r1", "<think>\nwhy\n</think>\n\nso"),
    ],
)
def test_markers_are_those_of_the_models_format(reasoning: str, text: str) -> None:
    style = style_of(TemplateTraits(), Formats(reasoning=reasoning))
    [message] = template_messages([said(ReasoningPart("why"), TextPart("so"))], style)
    assert message["content"] == text


def test_a_model_that_writes_no_thoughts_is_shown_none() -> None:
    assert briefly(TemplateTraits(), said(ReasoningPart("why"), TextPart("so")), markers=None) == [{"content": "so"}]


def test_thoughts_are_blocks_where_the_template_takes_blocks() -> None:
    [message, plain] = briefly(
        TemplateTraits(blocks=True), said(ReasoningPart("why"), TextPart("so")), said(TextPart("x"))
    )
    assert message["content"] == [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]
    assert plain["content"] == "x"


def test_white_space_beside_a_call_begins_no_message() -> None:
    assert briefly(FIELDS, said(A, TextPart("\n"), B)) == [{"content": "", "calls": ["fa", "fb"]}]


def test_text_after_a_call_begins_a_message() -> None:
    assert briefly(FIELDS, said(A, TextPart("then"), B)) == [
        {"content": "", "calls": ["fa"]},
        {"content": "then", "calls": ["fb"]},
    ]


def test_one_call_per_message_has_its_result_behind_it() -> None:
    traits = TemplateTraits(fields=("thinking",), parallel=False)
    assert briefly(traits, said(ReasoningPart("why"), A, B), results("b", "a")) == [
        {"content": "", "thinking": "why", "calls": ["fa"]},
        {"content": "result a", "tool_call_id": "a"},
        {"content": "", "calls": ["fb"]},
        {"content": "result b", "tool_call_id": "b"},
    ]


def test_results_come_in_the_order_of_the_calls_with_their_names() -> None:
    messages = template_messages([said(A, B), results("b"), results("x", "a")], MessageStyle())
    assert [(m["tool_call_id"], m.get("name")) for m in messages[1:]] == [("a", "fa"), ("b", "fb"), ("x", None)]


def test_text_that_may_not_stand_beside_a_call_stands_before_it() -> None:
    apart = TemplateTraits(fields=("reasoning_content",), text_with_calls=False, empty_content=None)
    turn = said(ReasoningPart("why"), TextPart("text"), A)
    assert briefly(apart, turn) == [
        {"content": "text", "reasoning_content": "why"},
        {"content": None, "calls": ["fa"]},
    ]
    with_call = msgspec.structs.replace(apart, thought_apart=False)
    assert briefly(with_call, turn) == [
        {"content": "text"},
        {"content": None, "reasoning_content": "why", "calls": ["fa"]},
    ]
    beside = msgspec.structs.replace(apart, text_apart=False)
    assert briefly(beside, turn) == [{"content": "text", "reasoning_content": "why", "calls": ["fa"]}]


def test_text_goes_into_the_thought_where_both_and_a_call_are_refused() -> None:
    traits = TemplateTraits(fields=("thinking",), thought_with_both=False)
    assert briefly(traits, said(ReasoningPart("why"), TextPart("text"), A)) == [
        {"content": "", "thinking": "why\n\ntext", "calls": ["fa"]}
    ]


def test_a_closing_marker_in_text_is_not_taken_for_the_end_of_a_thought() -> None:
    [message] = briefly(FIELDS, said(TextPart("write </think> then")))
    assert message == {"content": "write </think> then", "reasoning_content": ""}


def test_marker_words_of_users_and_tools_stay_as_they_are() -> None:
    text = "<think>x</think> y"
    turns = [Turn("user", (TextPart(text),)), said(A), Turn("tool", (ToolResultPart("a", (TextPart(text),)),))]
    assert [m["content"] for m in template_messages(turns, MessageStyle(FIELDS, THINK))] == [text, "", text]


def test_ids_are_nine_letters_and_digits_where_the_template_wants_that() -> None:
    style = MessageStyle(TemplateTraits(short_ids=True))
    turns = [said(ToolCallPart("call_1234567890", "f"), ToolCallPart("abcdEFGH1", "f")), results("call_1234567890")]
    first, again = template_messages(turns, style), template_messages(turns, style)
    assert first == again
    ids = [c["id"] for c in first[0]["tool_calls"]]
    assert ids[1] == "abcdEFGH1"
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert first[1]["tool_call_id"] == ids[0]


def test_calls_of_kimi_are_counted_over_the_conversation() -> None:
    style = style_of(TemplateTraits(), Formats(tool="kimi_k2"))
    turns = [
        said(ToolCallPart("call_x", "f"), ToolCallPart("functions.g:7", "g")),
        results("call_x"),
        said(ToolCallPart("y", "f")),
    ]
    messages = template_messages(turns, style)
    assert [c["id"] for c in messages[0]["tool_calls"]] == ["functions.f:0", "functions.g:7"]
    assert messages[1]["tool_call_id"] == "functions.f:0"
    assert messages[2]["tool_calls"][0]["id"] == "functions.f:2"


CLIENTS = '{"b": true, "a": "x"}'


def test_a_call_stands_as_it_was_written() -> None:
    known = WrittenCall("functions.f:0", "f", '{"a":"x",  "b":true}', {"a": "x", "b": "True"})

    def find(call_id: str, name: str, arguments: str) -> WrittenCall | None:
        return known if (call_id, name, arguments) == ("functionsf0", "f", CLIENTS) else None

    turns = [said(ToolCallPart("functionsf0", "f", CLIENTS)), results("functionsf0")]
    message, result = template_messages(turns, MessageStyle(), find)
    given = message["tool_calls"][0]["function"]["arguments"]
    assert ({key: str(value) for key, value in given.items()}, str(given)) == (known.written, known.arguments)
    assert [isinstance(value, str) for value in given.values()] == [True, False]
    assert message["tool_calls"][0]["id"] == result["tool_call_id"] == "functions.f:0"


def test_values_stand_as_they_were_written_where_the_template_goes_through_them() -> None:
    known = WrittenCall("c", "f", '{"s": "x",  "o": {"n":1.50}}')
    turns = [said(ToolCallPart("c", "f"))]
    traits = TemplateTraits(values_as_json=True)
    [message] = template_messages(turns, MessageStyle(traits), lambda *_: known)
    given = message["tool_calls"][0]["function"]["arguments"]
    assert {key: str(value) for key, value in given.items()} == {"s": "x", "o": '{"n":1.50}'}
    [message] = template_messages(turns, MessageStyle(), lambda *_: known)
    assert message["tool_calls"][0]["function"]["arguments"] == {"s": "x", "o": {"n": 1.5}}


@pytest.mark.parametrize(
    ("what", "word"), [("image", "image"), ("image/png", "image"), ("application/pdf", "document")]
)
def test_an_image_or_document_is_a_note_in_its_place(what: str, word: str) -> None:
    turn = Turn("user", (TextPart("see"), ImagePart("data:image/png;base64,AAAA", what), TextPart("this")))
    [message] = template_messages([turn], MessageStyle())
    assert message["content"] == f"see\n[{word} omitted: this model reads text only]\nthis"


def test_names_of_speakers_are_kept() -> None:
    messages = template_messages(
        [Turn("user", (TextPart("x"),), "ann"), Turn("assistant", (A,), "bot")], MessageStyle()
    )
    assert [message["name"] for message in messages] == ["ann", "bot"]


def test_a_turn_of_thousands_of_texts_and_calls_takes_no_square_of_them() -> None:
    """As many as fit into the largest body: what looks at all of them for each one does not come to an end here."""
    count = 20_000
    texts = tuple(TextPart("x") for _ in range(count))
    calls = tuple(ToolCallPart(f"c{i}", "f", "{}") for i in range(count))
    results = tuple(ToolResultPart(f"c{i}", (TextPart(f"{i}"),)) for i in reversed(range(count)))
    traits = msgspec.structs.replace(FIELDS, parallel=False)
    turns = (Turn("assistant", (*texts, *calls)), Turn("tool", results))
    messages = template_messages(turns, MessageStyle(traits))
    assert [message["content"] for message in messages[1::2]] == [f"{i}" for i in range(count)]


def test_results_that_belong_to_no_call_come_last_and_in_order() -> None:
    def result(call_id: str, text: str) -> ToolResultPart:
        return ToolResultPart(call_id, (TextPart(text),))

    traits = msgspec.structs.replace(FIELDS, parallel=False)
    turns = (
        Turn("assistant", (ToolCallPart("a", "f", "{}"), ToolCallPart("b", "f", "{}"))),
        Turn("tool", (result("z", "1"), result("b", "2"), result("y", "3"), result("a", "4"), result("b", "5"))),
    )
    messages = template_messages(turns, MessageStyle(traits))
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["4", "2", "5", "1", "3"]
