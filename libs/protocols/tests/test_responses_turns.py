"""Responses requests as conversations."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols import InvalidRequest
from kvbus_protocols.conversation import (
    Conversation,
    Grammar,
    ImagePart,
    OutputFormat,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
    Turn,
)
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_protocols.responses.tools import Callee
from kvbus_protocols.responses_turns import (
    SUMMARY_INTRODUCTION,
    TOOLS_INTRODUCTION,
    Unseal,
    responses_conversation,
)

ECHO = {"type": "function", "name": "echo", "parameters": {"type": "object"}}


def request(items: Any = "hi", **fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": items, **fields}, ResponsesRequest)


def conversation(items: Any = "hi", **fields: Any) -> Conversation:
    return responses_conversation(request(items, **fields)).conversation


def turns(items: Any, **fields: Any) -> tuple[Turn, ...]:
    return conversation(items, **fields).turns


def refused(items: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        conversation(items, **fields)
    return refusal.value


def call(call_id: str = "c", name: str = "echo", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def result(output: Any = "ok", call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def user(text: str) -> Turn:
    return Turn("user", (TextPart(text),))


def system(text: str) -> Turn:
    return Turn("system", (TextPart(text),))


def test_text_is_one_user_turn_behind_the_instructions() -> None:
    assert turns("hi", instructions="Be brief.") == (system("Be brief."), user("hi"))


def test_empty_text_is_a_user_turn_without_parts() -> None:
    assert turns("") == (Turn("user", ()),)


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": "hi"}, {"type": "message", "role": "user", "content": "hi"}]
)
def test_a_message_needs_no_type(message: dict[str, Any]) -> None:
    assert turns([message]) == (user("hi"),)


def test_instructions_come_before_leading_developer_messages() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert turns(items, instructions="a") == (system("a"), system("b"), system("c"), user("d"))


def test_all_forms_of_content_become_parts_in_order() -> None:
    content = [
        {"type": "input_text", "text": "look", "annotations": None},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"},
        {"type": "input_file", "file_url": "https://example.org/b.txt"},
        {"type": "refusal", "refusal": "no"},
    ]
    assert turns([{"role": "user", "content": content}])[0].parts == (
        TextPart("look"),
        ImagePart("data:image/png;base64,AA=="),
        ImagePart("data:application/pdf;base64,AA==", "application/pdf"),
        ImagePart("https://example.org/b.txt", "text/plain"),
        TextPart("no"),
    )


def test_what_the_assistant_says_in_a_row_is_one_turn_in_order() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        call("c1", arguments='{"x": 1}', id="fc_1", status="completed"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}], "id": None},
        call("c2", arguments=""),
        result("1", "c1"),
        result([{"type": "input_text", "text": "2"}, {"type": "input_image", "image_url": "http://x"}], "c2"),
    ]
    assert turns(items) == (
        user("go"),
        Turn(
            "assistant",
            (
                ReasoningPart("a"),
                ToolCallPart("c1", "echo", '{"x": 1}'),
                ReasoningPart("b"),
                TextPart("so"),
                ToolCallPart("c2", "echo", ""),
            ),
        ),
        Turn(
            "tool",
            (
                ToolResultPart("c1", (TextPart("1"),)),
                ToolResultPart("c2", (TextPart("2"), ImagePart("http://x"))),
            ),
        ),
    )


def test_earlier_items_come_first_and_call_and_result_may_lie_in_different_requests() -> None:
    earlier = [{"role": "user", "content": "go"}, call()]
    found = responses_conversation(request([result()]), earlier).conversation.turns
    assert [turn.role for turn in found] == ["user", "assistant", "tool"]


def test_a_sealed_thought_wins_over_what_is_readable() -> None:
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": None,
        "encrypted_content": "sealed",
    }
    unseal = Unseal(reasoning=lambda sealed: "long" if sealed == "sealed" else None)
    found = responses_conversation(request([item]), unseal=unseal).conversation
    assert found.turns[0].parts == (ReasoningPart("long"),)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "raw"}], "summary": []}, "raw"),
        (
            {"content": [], "summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]},
            "a\n\nb",
        ),
    ],
)
def test_a_blob_that_nobody_can_open_leaves_what_is_readable(fields: dict[str, Any], text: str) -> None:
    assert turns([{"type": "reasoning", "encrypted_content": "foreign", **fields}])[0].parts == (ReasoningPart(text),)


def test_an_empty_thought_leaves_no_part() -> None:
    assert turns([{"role": "user", "content": "x"}, {"type": "reasoning", "summary": []}]) == (user("x"),)


def test_a_custom_call_and_its_output_are_free_text() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]},
    ]
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"},
    }
    found = responses_conversation(request(items, tools=[tool]))
    assert found.conversation.turns == (
        Turn("assistant", (ToolCallPart("c", "apply_patch", "*** Begin", custom=True),)),
        Turn("tool", (ToolResultPart("c", (TextPart("done"),)),)),
    )
    assert found.conversation.tools == (ToolSpec(name="apply_patch", custom=True, grammar=Grammar("lark", "start: A")),)
    assert found.callees == {"apply_patch": Callee("apply_patch", kind="custom")}


def test_a_shell_call_of_an_older_model_is_a_call_with_its_action_as_arguments() -> None:
    action = {"type": "exec", "command": ["echo", "hi"]}
    items = [{"type": "local_shell_call", "call_id": "c", "id": "lsh_1", "action": action}, result("hi")]
    assert turns(items) == (
        Turn("assistant", (ToolCallPart("c", "local_shell", '{"type":"exec","command":["echo","hi"]}'),)),
        Turn("tool", (ToolResultPart("c", (TextPart("hi"),)),)),
    )
    assert refused([{**items[0], "call_id": None}]).param == "input[0].call_id"


def test_tools_of_a_namespace_go_by_their_bare_names_and_calls_find_them_again() -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}, ECHO]
    found = responses_conversation(request([call(name="spawn", namespace="agents")], tools=tools))
    assert [(tool.name, tool.namespace) for tool in found.conversation.tools] == [("spawn", "agents"), ("echo", None)]
    assert found.callees["spawn"] == Callee("spawn", "agents")
    assert found.conversation.turns[0].parts == (ToolCallPart("c", "spawn", "{}"),)


def test_of_two_tools_of_one_name_the_later_one_is_qualified() -> None:
    tools = [
        {"type": "namespace", "name": space, "tools": [{"type": "function", "name": "search"}]} for space in ("a", "b")
    ]
    found = responses_conversation(request([call(name="search", namespace="b")], tools=tools))
    assert [tool.name for tool in found.conversation.tools] == ["search", "b__search"]
    assert found.callees["b__search"] == Callee("search", "b")
    assert found.conversation.turns[0].parts == (ToolCallPart("c", "b__search", "{}"),)


def test_hosted_tools_are_accepted_and_not_offered() -> None:
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_label": "x"},
        {"type": "new_one"},
    ]
    assert conversation(tools=[*hosted, ECHO]).tools == (ToolSpec(name="echo", parameters={"type": "object"}),)


def test_what_a_tool_search_finds_is_shown_in_its_result_and_callable() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}}
    found_tools = [
        {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send", "description": "s"}]}
    ]
    items = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": found_tools},
    ]
    found = responses_conversation(request(items, tools=[search]))
    assert found.conversation.turns == (
        Turn("assistant", (ToolCallPart("c", "tool_search", '{"query":"mail"}'),)),
        Turn(
            "tool",
            (
                ToolResultPart(
                    "c",
                    (
                        TextPart(
                            '<functions>\n<function>{"description":"s","name":"send","parameters":{}}</function>\n</functions>'
                        ),
                    ),
                ),
            ),
        ),
    )
    assert [(tool.name, tool.deferred) for tool in found.conversation.tools] == [("tool_search", False), ("send", True)]
    assert found.callees == {"tool_search": Callee("tool_search", kind="search"), "send": Callee("send", "mail")}


def test_additional_tools_stand_at_the_top_when_they_come_first_and_in_place_later() -> None:
    def additional(name: str) -> dict[str, Any]:
        return {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": name}]}

    items = [
        {"role": "developer", "content": "d"},
        additional("first"),
        {"role": "user", "content": "go"},
        additional("later"),
    ]
    found = conversation(items, tools=[])
    assert [(tool.name, tool.deferred) for tool in found.tools] == [("first", False), ("later", True)]
    assert [turn.role for turn in found.turns] == ["system", "user", "system"]
    shown = found.turns[2].parts[0]
    assert isinstance(shown, TextPart)
    assert shown.text.startswith(TOOLS_INTRODUCTION)
    assert '"name":"later"' in shown.text


@pytest.mark.parametrize("searchable", [False, True])
def test_tools_whose_loading_is_deferred_wait_only_if_the_client_can_search_them(searchable: bool) -> None:
    search = [{"type": "tool_search", "execution": "client"}] if searchable else [{"type": "tool_search"}]
    tools = conversation(tools=[*search, {**ECHO, "defer_loading": True}]).tools
    assert tools[-1].deferred is searchable


def test_items_of_hosted_tools_pass_silently() -> None:
    assert turns(
        [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "ws", "status": "completed"}]
    ) == (user("x"),)


def test_a_compaction_item_becomes_the_summary_it_seals() -> None:
    item = {"type": "compaction", "id": "cmp", "encrypted_content": "sealed"}
    found = responses_conversation(request([item]), unseal=Unseal(compaction=lambda _sealed: "we agreed")).conversation
    assert found.turns == (user(SUMMARY_INTRODUCTION + "we agreed"),)
    assert refused([item]).param == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "echo"}, ToolChoice("required", ("echo",), named=True)),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "echo"}, {"type": "web_search"}],
            },
            ToolChoice("auto", ("echo",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "echo"}]},
            ToolChoice("required", ("echo",)),
        ),
    ],
)
def test_every_form_of_tool_choice(choice: Any, expected: ToolChoice) -> None:
    asked = request(tools=[ECHO], tool_choice=choice)
    asked.check()
    assert responses_conversation(asked).conversation.tool_choice == expected


def test_a_custom_tool_can_be_chosen() -> None:
    asked = request(tools=[{"type": "custom", "name": "shell"}], tool_choice={"type": "custom", "name": "shell"})
    asked.check()
    assert responses_conversation(asked).conversation.tool_choice == ToolChoice("required", ("shell",), named=True)


def test_the_text_format_becomes_the_output_format() -> None:
    form = {"type": "json_schema", "name": "o", "schema": {"type": "object"}, "strict": True}
    assert conversation(text={"format": form}).output_format == OutputFormat(
        kind="json_schema", schema={"type": "object"}, name="o", strict=True
    )
    assert conversation(text={"format": {"type": "json_object"}}).output_format == OutputFormat(kind="json_object")
    assert conversation(text={"verbosity": "low"}).output_format is None


@pytest.mark.parametrize(("effort", "reasons"), [("none", False), ("minimal", True), ("high", True)])
def test_the_effort_reaches_the_template(effort: str, reasons: bool) -> None:
    found = conversation(reasoning={"effort": effort, "summary": "auto"})
    assert (found.reasoning, found.template_variables) == (reasons, {"reasoning_effort": effort})
    assert conversation(reasoning={"summary": "auto"}).reasoning is None


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "robot", "content": "x"}, "input[0].role"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].file_data"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c"}, "input[0].name"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "nowhere", "output": "x"}, "input"),
        ({"type": "custom_tool_call_output", "call_id": "nowhere", "output": "x"}, "input"),
        ({"type": "compaction"}, "input[0].encrypted_content"),
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "brand_new"}, "input[0].type"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "input[0].tools[0].name"),
    ],
)
def test_an_item_that_makes_no_sense_is_refused_with_its_path(item: dict[str, Any], param: str) -> None:
    assert refused([item]).param == param


def test_an_output_without_its_call_is_refused_in_the_words_that_clients_know() -> None:
    assert refused([result()]).message == "No tool call found for function call output with call_id c."


def test_thousands_of_items_in_a_row_are_one_turn_and_take_no_square_of_them() -> None:
    """Copying what was said for each item does not come to an end here."""
    (turn,) = turns([{"role": "assistant", "content": "x"}] * 30_000)
    assert len(turn.parts) == 30_000


def test_a_tool_that_is_found_again_is_named() -> None:
    """Naming a large tool a thousand times makes no prompt of a thousand large tools."""
    search = {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}}
    large = {"type": "function", "name": "send", "description": "d" * 10_000, "parameters": {"type": "object"}}
    calls: list[Any] = [
        {"type": "tool_search_call", "call_id": f"c{i}", "execution": "client", "arguments": {}} for i in range(100)
    ]
    outputs: list[Any] = [
        {
            "type": "tool_search_output",
            "call_id": f"c{i}",
            "execution": "client",
            "tools": [{**large, "description": ""}],
        }
        for i in range(1, 100)
    ]
    first = {"type": "tool_search_output", "call_id": "c0", "execution": "client", "tools": [large]}
    last = turns([*calls, first, *outputs], tools=[search])[-1]
    (again,) = {part.parts for part in last.parts[1:] if isinstance(part, ToolResultPart)}
    assert again == (
        TextPart('<functions>\n<function>{"description":"As shown above.","name":"send"}</function>\n</functions>'),
    )
