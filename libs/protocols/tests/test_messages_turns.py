"""Messages requests to conversations."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols import InvalidRequest, RequestDecoder, anthropic_body
from kvbus_protocols.conversation import (
    CacheBreakpoint,
    Conversation,
    ImagePart,
    OutputFormat,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    Turn,
)
from kvbus_protocols.extensions import Session
from kvbus_protocols.messages import CountTokensRequest, MessagesRequest
from kvbus_protocols.messages_echo import sign_thought, tool_use_id
from kvbus_protocols.messages_turns import messages_conversation

DECODER = RequestDecoder(MessagesRequest)
TOOL = {
    "name": "f",
    "description": "does f",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
KEPT = {"cache_control": {"type": "ephemeral"}}
KEPT_LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def said(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if isinstance(content[0], str) else list(content)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 2048, "messages": list(messages) or [said("user", "hi")], **fields}


def conversation(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return messages_conversation(DECODER.decode(msgspec.json.encode(body(*messages, **fields))))


def turn(role: Any, *parts: Any) -> Turn:
    return Turn(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def refusal(*messages: dict[str, Any], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        conversation(*messages, **fields)
    return refused.value


# turns


def test_system_text_is_the_first_turn_whatever_its_form() -> None:
    assert conversation(system="Be brief.").turns == (turn("system", "Be brief."), turn("user", "hi"))
    assert conversation(system=[text("Be brief.", **KEPT)]).turns == conversation(system="Be brief.").turns
    assert conversation(system=[text("A."), text("B.")]).turns[0] == turn("system", "A.", "B.")
    assert conversation(system="").turns == conversation(system=[]).turns == (turn("user", "hi"),)


def test_content_is_the_same_as_text_and_as_blocks() -> None:
    assert conversation(said("user", text("hi"))).turns == conversation(said("user", "hi")).turns


def test_system_messages_stay_where_they_are() -> None:
    turns = conversation(
        said("user", "q"), said("system", "env"), said("assistant", "a"), said("system", text("end"))
    ).turns
    assert [t.role for t in turns] == ["user", "system", "assistant", "system"]
    assert not conversation(said("user", "q"), said("system", "env")).continue_final


def test_an_answer_keeps_the_order_of_its_thoughts_words_and_calls() -> None:
    turns = conversation(
        said("user", "go"),
        said(
            "assistant",
            {"type": "thinking", "thinking": "first", "signature": "s"},
            text("Looking."),
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": "é", "n": 1.0}},
            {"type": "thinking", "thinking": "second", "signature": ""},
            {"type": "tool_use", "id": "b", "name": "f", "input": {}},
        ),
        said("user", {"type": "tool_result", "tool_use_id": "a", "content": "1"},
             {"type": "tool_result", "tool_use_id": "b"}),
        tools=[TOOL],
    ).turns  # fmt: skip
    assert turns[1].parts == (
        ReasoningPart("first"),
        TextPart("Looking."),
        ToolCallPart("a", "f", '{"a": "é", "n": 1.0}'),
        ReasoningPart("second"),
        ToolCallPart("b", "f", "{}"),
    )
    assert turns[2] == turn("tool", ToolResultPart("a", (TextPart("1"),)), ToolResultPart("b"))


def test_results_come_before_the_words_of_the_same_message() -> None:
    turns = conversation(
        said("user", "go"),
        said("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
        said(
            "user", text("and now?"), {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "boom"}
        ),
    ).turns
    assert turns[2:] == (
        turn("tool", ToolResultPart("a", (TextPart("boom"),), is_error=True)),
        turn("user", "and now?"),
    )


def test_messages_of_one_side_in_a_row_are_one_turn() -> None:
    turns = conversation(
        said("user", "a"), said("user", text("b")), said("assistant", "c"), said("assistant", "d"), said("user", "e")
    ).turns
    assert turns == (turn("user", "a", "b"), turn("assistant", "c", "d"), turn("user", "e"))


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
            [ImagePart("data:image/png;base64,iVBO")],
        ),
        ({"type": "image", "source": {"type": "url", "url": "https://h/x.png"}}, [ImagePart("https://h/x.png")]),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}},
            [ImagePart("data:application/pdf;base64,JVBE", "application/pdf")],
        ),
        (
            {"type": "document", "title": "T", "context": "C", "citations": {"enabled": True},
             "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
            [TextPart("T\nC"), TextPart("words")],
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("one"), text("two")]}},
            [TextPart("one"), TextPart("two")],
        ),
        ({"type": "document", "source": {"type": "content", "content": "one"}}, [TextPart("one")]),
        ({"type": "document", "source": {"type": "url", "url": "u"}}, [ImagePart("u", "application/pdf")]),
        (
            {"type": "search_result", "source": "https://s", "title": "T", "content": [text("found")]},
            [TextPart("T\nhttps://s\nfound")],
        ),
    ],
)  # fmt: skip
def test_every_kind_of_content_becomes_parts_in_messages_and_in_results(block: Any, parts: list[Any]) -> None:
    assert conversation(said("user", block)).turns == (turn("user", *parts),)
    turns = conversation(said("user", {"type": "tool_result", "tool_use_id": "a", "content": [block]})).turns
    assert turns == (turn("tool", ToolResultPart("a", tuple(parts))),)


def test_what_another_server_has_run_is_left_out_of_its_answer() -> None:
    run = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
    ]
    turns = conversation(said("user", "x"), said("assistant", *run, text("found")), said("user", "y")).turns
    assert turns == (turn("user", "x"), turn("assistant", "found"), turn("user", "y"))
    assert "can only be in `assistant` messages" in refusal(said("user", *run)).message


def test_thoughts_return_by_their_signature_when_the_text_is_gone() -> None:
    blocks = [
        {"type": "thinking", "thinking": "", "signature": sign_thought("why ☃")},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "thinking", "thinking": "", "signature": "c2ln"},
        {"type": "thinking", "thinking": "told", "signature": sign_thought("other")},
        text("ok"),
    ]
    turns = conversation(said("user", "x"), said("assistant", *blocks), said("user", "y")).turns
    assert turns[1].parts == (ReasoningPart("why ☃"), ReasoningPart("told"), TextPart("ok"))


def test_calls_get_the_ids_back_that_the_model_gave_them() -> None:
    theirs = tool_use_id("functions.f:0")
    turns = conversation(
        said("assistant", {"type": "tool_use", "id": theirs, "name": "f", "input": {}}),
        said("user", {"type": "tool_result", "tool_use_id": theirs}, {"type": "tool_result", "tool_use_id": "other"}),
    ).turns
    assert turns[0].parts == (ToolCallPart("functions.f:0", "f", "{}"),)
    assert turns[1].parts == (ToolResultPart("functions.f:0"), ToolResultPart("other"))


def test_a_last_answer_is_continued() -> None:
    found = conversation(said("user", "x"), said("assistant", "The answer is ("))
    assert (found.continue_final, found.add_generation_prompt) == (True, False)
    assert found.turns[-1] == turn("assistant", "The answer is (")
    for nothing in ("", [], [text("")]):
        found = conversation(said("user", "x"), {"role": "assistant", "content": nothing})
        assert (found.continue_final, found.add_generation_prompt) == (False, True)
        assert found.turns == (turn("user", "x"),)


# tools


def test_tools_of_the_client_are_taken_and_those_of_the_server_left_out() -> None:
    found = conversation(
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
               {**TOOL, "name": "g", "type": "custom", "strict": True, "input_examples": [{}]},
               {"type": "mcp_toolset", "mcp_server_name": "x"}],
        tool_choice={"type": "any"},
    )  # fmt: skip
    assert [(t.name, t.strict, t.deferred) for t in found.tools] == [("f", False, False), ("g", True, False)]
    assert found.tools[0].parameters == TOOL["input_schema"]
    assert found.tool_choice == ToolChoice("required")


@pytest.mark.parametrize("kind", ["function", "", "Custom"])
def test_a_tool_of_another_api_is_refused_and_not_left_out(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"tools\.1: Input tag '{kind}' found") as caught:
        conversation(tools=[TOOL, {"type": kind, "function": {"name": "g", "parameters": {}}}])
    assert caught.value.param == "tools.1.type"


def test_a_deferred_tool_is_described_where_a_result_refers_to_it() -> None:
    reference = {"type": "tool_reference", "tool_name": "f"}
    gone = {"type": "tool_reference", "tool_name": "gone"}
    found = conversation(
        said("user", {"type": "tool_result", "tool_use_id": "a", "content": [text("Found:"), reference, gone]}),
        tools=[{**TOOL, "defer_loading": True}],
    )
    assert found.tools[0].deferred
    assert found.turns[0].parts == (
        ToolResultPart(
            "a",
            (
                TextPart("Found:"),
                TextPart(
                    "<functions>\n"
                    '<function>{"description":"does f","name":"f","parameters":'
                    '{"type":"object","properties":{"a":{"type":"string"}}}}</function>\n'
                    '<function>{"description":"","name":"gone","parameters":{}}</function>\n'
                    "</functions>"
                ),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "f"}, ToolChoice("required", ("f",), named=True), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "web_search"}, ToolChoice(), True),
    ],
)
def test_tool_choices_have_the_meaning_of_the_other_apis(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    found = conversation(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (expected, parallel)


def test_with_the_servers_tools_alone_no_call_is_forced() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    assert conversation(tools=tools, tool_choice={"type": "any"}).tool_choice == ToolChoice()
    assert conversation(tools=tools).tools == ()


# the rest


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "disabled"}, False),
        ({"type": "between_tools"}, None),
    ],
)
def test_thinking_is_a_wish(thinking: Any, expected: bool | None) -> None:
    assert conversation(thinking=thinking).reasoning is expected


def test_with_tools_the_budget_for_thoughts_may_exceed_that_of_one_answer() -> None:
    assert conversation(thinking={"type": "enabled", "budget_tokens": 31_999}, tools=[TOOL]).reasoning


def test_output_config_sets_effort_and_format() -> None:
    schema = {"type": "object"}
    found = conversation(output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}})
    assert found.template_variables == {"reasoning_effort": "high"}
    assert found.output_format == OutputFormat(kind="json_schema", schema=schema, strict=True)
    assert conversation(output_format={"type": "json_schema", "schema": schema}).output_format == found.output_format
    own = conversation(output_config={"effort": "low"}, chat_template_kwargs={"reasoning_effort": "max", "x": 1})
    assert own.template_variables == {"reasoning_effort": "max", "x": 1}


def test_stop_sequences_are_the_stop_strings() -> None:
    found = conversation(stop_sequences=["\n\nHuman:", "END"], stop=["unused"])
    assert found.generation.stop_strings == ("\n\nHuman:", "END")
    assert found.generation.token_limit == 2048


def test_breakpoints_name_the_turn_they_are_in_and_how_long_it_is_worth_keeping() -> None:
    found = conversation(
        said("user", "a"),
        said("assistant", text("b", **KEPT), text("c", **KEPT_LONG)),
        said("user", {"type": "tool_result", "tool_use_id": "x", "content": [text("r", **KEPT)]}, text("d")),
        system=[text("s")],
        tools=[{**TOOL, **KEPT_LONG}],
    )
    assert found.breakpoints == (
        CacheBreakpoint(-1, 3600.0),
        CacheBreakpoint(2, 300.0, after=1),
        CacheBreakpoint(2, 3600.0),
        CacheBreakpoint(3, 300.0),
    )
    assert conversation(system=[text("s", **KEPT)], **KEPT_LONG).breakpoints == (
        CacheBreakpoint(0, 300.0),
        CacheBreakpoint(1, 3600.0),
    )
    assert conversation(system=[text("s", cache_control=None)]).breakpoints == ()


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id":"d","account_uuid":"","session_id":"1f2e"}', Session("1f2e")),
        ("user_ab12_account__session_0c5c0d3e-aaaa-bbbb-cccc-0123456789ab", Session("0c5c0d3e-aaaa-bbbb-cccc-0123456789ab")),
        ("somebody", None),
        ('{"session_id":5}', None),
        ('{"session_id":""}', None),
        ("[" * 5000, None),
        (None, None),
    ],
)  # fmt: skip
def test_the_session_in_the_users_id_counts_where_no_other_is_named(
    user_id: str | None, session: Session | None
) -> None:
    kvbus = conversation(metadata={"user_id": user_id}).generation.kvbus
    assert (kvbus.session if kvbus is not None else None) == session
    own = conversation(metadata={"user_id": user_id}, kvbus={"session": {"id": "own"}}).generation.kvbus
    assert own is not None
    assert own.session == Session("own")


def test_claude_code_is_known_by_its_billing_block() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.332.db5; cc_entrypoint=cli;")
    found = conversation(system=[billing, text("You are")])
    assert found.harness == "claude-code"
    assert found.turns[0].parts[0] == TextPart(billing["text"])
    assert conversation(system=[text("Of a proxy."), billing]).harness == "claude-code"
    assert conversation(system="You are").harness == ""


def test_what_clients_send_besides_does_not_matter() -> None:
    found = conversation(
        {**said("user", text("hi", citations=None)), "output_config": {"effort": "medium"}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto", betas=["x"], container=None, mcp_servers=[], top_k=5, speed="fast", stream=True,
        nvext={"agent_hints": {"priority": 3}}, kvbus={"mock": {"output": "x"}}, temperature=1, seed=3,
    )  # fmt: skip
    assert found.turns == (turn("user", "hi"),)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"n": 2}, "n: this API has one answer per request"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "'stop_sequences' holds 17 strings"),
        ({"thinking": {"type": "enabled"}}, "thinking.enabled.budget_tokens: Field required"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1000}},
            "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            "`max_tokens` must be greater than `thinking.budget_tokens`",
        ),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "get"}]}, "tools.0.custom.input_schema: Field required"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.custom.name: Field required"),
        ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice may only be specified while providing tools."),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.tool.name: Field required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "Tool 'g' not found in provided tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        (
            {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
            "cache_control.ttl': invalid enum value '2h' (known: 1h, 5m)",
        ),
        ({"system": [text("s", **KEPT)] * 5}, "A maximum of 4 blocks with cache_control may be provided. Found 5."),
        ({"system": [text("s", **KEPT)] * 4, **KEPT}, "Found 5."),
        ({"nvext": {"x": 1}}, "invalid nvext: unknown field `x`"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_words_that_name_the_field(fields: Any, words: str) -> None:
    given = msgspec.json.encode({name: value for name, value in {**body(), **fields}.items() if value is not None})
    with pytest.raises(InvalidRequest) as refused:
        messages_conversation(DECODER.decode(given))
    assert words in anthropic_body(refused.value).error.message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (said("user", ""), "messages.0: all messages must have non-empty content"),
        ({"role": "user", "content": []}, "messages.0: all messages must have non-empty content"),
        (said("user", text("")), "messages.0: all messages must have non-empty content"),
        (said("assistant", ""), "messages: at least one message with content is required"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        (said("user", {"type": "hologram"}), "messages[0].content[0].type"),
        (said("user", {"type": "server_tool_use", "id": "x", "name": "w", "input": {}}), "server_tool_use"),
        (
            said("user", {"type": "tool_use", "id": "x", "name": "f", "input": {}}),
            "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages",
        ),
        (
            said("assistant", {"type": "tool_result", "tool_use_id": "x"}),
            "messages.0.content.0: `tool_result` blocks can only be in `user` messages",
        ),
        (
            said("assistant", {"type": "tool_use", "id": "x", "name": "f", "input": {}}),
            "messages.0: the final block of a final assistant message cannot be `tool_use`",
        ),
        (
            said("assistant", text("a"), {"type": "thinking", "thinking": "b"}),
            "messages.0: the final block of a final assistant message cannot be `thinking`",
        ),
        (
            said("system", {"type": "image", "source": {"type": "url", "url": "u"}}),
            "messages.0.content.0: `system` messages can only have `text` blocks",
        ),
        (said("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages.0.content.0.source"),
        (said("user", {"type": "image", "source": {"type": "ftp"}}), "messages[0].content[0].source.type"),
        (said("assistant", {"type": "tool_use", "id": "x", "name": "f", "input": "{}"}), "messages[0].content[0].input"),
    ],
)  # fmt: skip
def test_a_message_that_makes_no_sense_is_refused_in_words_that_name_it(message: Any, words: str) -> None:
    assert words in anthropic_body(refusal(message)).error.message


def test_arguments_without_end_are_refused_and_crash_nothing() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    request = body(said("assistant", {"type": "tool_use", "id": "x", "name": "f", "input": deep}), said("user", "go"))
    try:
        messages_conversation(DECODER.decode(msgspec.json.encode(request)))
    except InvalidRequest as refused:
        assert refused.code == "nesting_too_deep"  # noqa: PT017  # how deep is too deep differs between Python versions


def test_counting_needs_no_limit_and_makes_the_same_prompt() -> None:
    given = body(said("user", "x"), system="s", tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 4000})
    del given["max_tokens"]
    counted = messages_conversation(RequestDecoder(CountTokensRequest).decode(msgspec.json.encode(given)))
    asked = conversation(said("user", "x"), system="s", tools=[TOOL], thinking={"type": "adaptive"})
    assert (counted.turns, counted.tools, counted.reasoning) == (asked.turns, asked.tools, asked.reasoning)


def test_a_tool_that_is_referred_to_again_is_named() -> None:
    """Naming a large tool a thousand times makes no prompt of a thousand large tools."""
    reference = {"type": "tool_reference", "tool_name": "f"}
    calls = [{"type": "tool_use", "id": f"t{i}", "name": "find", "input": {}} for i in range(2)]
    made = conversation(
        said("user", "go"),
        said("assistant", *calls),
        said(
            "user",
            {"type": "tool_result", "tool_use_id": "t0", "content": [reference] * 3},
            {"type": "tool_result", "tool_use_id": "t1", "content": [reference]},
        ),
        tools=[{**TOOL, "defer_loading": True}],
    )
    again = '<function>{"description":"As shown above.","name":"f"}</function>'
    first, second = (part.parts[0] for part in made.turns[2].parts if isinstance(part, ToolResultPart))
    assert isinstance(first, TextPart)
    assert first.text.count("does f") == 1
    assert first.text.endswith(f"\n{again}\n{again}\n</functions>")
    assert second == TextPart(f"<functions>\n{again}\n</functions>")
