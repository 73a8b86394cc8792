"""From what a conversation demands to guidance and the parser's mode."""

import json
from typing import Any

import pytest

from kvbus_frontend.core.guidance import FIELDS, Guided, guidance_of
from kvbus_frontend.core.schemas import SchemaLimits
from kvbus_protocols.conversation import Conversation, Grammar, OutputFormat, TextPart, ToolChoice, ToolSpec, Turn
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.generation import GenerationRequest
from kvbus_wire.guidance import CallSection, FreeBlock, Guidance

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = ToolSpec(name="get_weather", parameters=CITY)
CLOCK = ToolSpec(name="clock", parameters={"type": "object", "properties": {}, "additionalProperties": False})
STRICT = ToolSpec(name="get_weather", parameters=CITY, strict=True)
FREE_FORM = ToolSpec(name="patch", custom=True, grammar=Grammar("lark", 'start: "x"+'))
REQUIRED = ToolChoice("required")
NAMED = ToolChoice("required", ("get_weather",), named=True)
JSON_ANSWER = OutputFormat(kind="json_schema", schema=CITY, strict=True)


def conversation(**fields: Any) -> Conversation:
    turns = (Turn("user", (TextPart("hi"),)),)
    return Conversation(generation=GenerationRequest(model="m"), turns=turns, **fields)


def guided(
    tool: str | None = "hermes", reasoning: str | None = None, is_open: bool | None = None, **fields: Any
) -> Guided:
    return guidance_of(conversation(**fields), tool=tool, reasoning=reasoning, reasoning_open=is_open)


def guidance(*args: Any, **fields: Any) -> Guidance:
    found = guided(*args, **fields).guidance
    assert found is not None
    return found


def section(*args: Any, **fields: Any) -> CallSection:
    found = guidance(*args, **fields).section
    assert found is not None
    return found


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        guided(**fields)
    return caught.value


def test_plain_chats_are_not_guided() -> None:
    assert guided() == Guided(None)
    assert guided(tools=(WEATHER,)) == Guided(None)


def test_a_json_schema_becomes_the_form_of_the_text() -> None:
    found = guidance(output_format=JSON_ANSWER)
    assert (found.form, found.strict, found.param) == ("json_schema", True, "response_format")
    assert json.loads(found.text) == CITY
    assert list(json.loads(found.text)["properties"]) == ["city", "days"]  # in the order of the request
    assert found.section is None


def test_json_mode_asks_for_any_object() -> None:
    assert guidance(output_format=OutputFormat(kind="json_object")).form == "json_object"


def test_required_calls_are_written_in_the_models_own_form() -> None:
    found = section(tools=(WEATHER, CLOCK), tool_choice=REQUIRED)
    weather, clock = found.calls
    assert weather.begin == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert weather.end == "}\n</tool_call>"
    assert json.loads(weather.schema) == CITY
    assert clock.param == "tools[1].function.parameters"
    assert (found.separator, found.parallel) == ("\n", True)


def test_an_engine_that_writes_bare_json_instead_is_understood() -> None:
    assert guided(tools=(WEATHER,), tool_choice=REQUIRED).calls == "guided_array"
    assert guided(tools=(WEATHER,), tool_choice=NAMED).calls == "guided_arguments:get_weather"
    assert guided("llama3_json", tools=(WEATHER,), tool_choice=NAMED).calls == "auto", "JSON is the model's own form"


def test_required_calls_of_an_unknown_form_are_a_bare_array() -> None:
    found = guided("kimi_k2", tools=(WEATHER, CLOCK), tool_choice=REQUIRED, parallel_tool_calls=False)
    assert found.calls == "guided_array"
    assert found.guidance is not None
    assert found.guidance.section is not None
    array = found.guidance.section
    assert (array.begin, array.end, array.separator, array.parallel) == ("[", "]", ", ", False)
    assert array.calls[0].begin == '{"name": "get_weather", "parameters": '


def test_a_named_tool_is_the_only_one_to_choose_from() -> None:
    assert [call.begin for call in section(tools=(CLOCK, WEATHER), tool_choice=NAMED).calls] == [
        '<tool_call>\n{"name": "get_weather", "arguments": '
    ]


def test_a_named_tool_of_an_unknown_form_is_its_bare_arguments() -> None:
    found = guided(None, tools=(CLOCK, WEATHER), tool_choice=NAMED)
    assert found.calls == "guided_arguments:get_weather"
    assert found.guidance == Guidance(
        form="json_schema",
        text=json.dumps(CITY, separators=(",", ":")),
        param="tools[1].function.parameters",
    )


def test_arguments_of_elements_are_typed_one_by_one() -> None:
    mode = {"mode": {"enum": ["a.b", "c"]}}
    tool = ToolSpec(name="f", parameters={**CITY, "properties": {**CITY["properties"], **mode}})
    (call,) = section("qwen3_coder", tools=(tool,), tool_choice=REQUIRED).calls
    assert call.begin == "<tool_call>\n<function=f>\n"
    city, days, chosen = call.arguments
    assert (city.begin, city.kind, city.end, city.required) == ("<parameter=city>\n", "text", "\n</parameter>\n", True)
    assert (days.kind, days.text, days.required) == ("json", '{"type":"integer"}', False)
    assert (chosen.kind, chosen.text) == ("regex", r"a\.b|c")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"},
        {"anyOf": [CITY, CITY]},
        {"type": "object", "properties": {"a b>": {"type": "string"}}},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
    ],
)
def test_arguments_that_cannot_be_listed_as_elements_are_a_bare_array(parameters: dict[str, Any]) -> None:
    tool = ToolSpec(name="f", parameters=parameters)
    assert guided("qwen3_coder", tools=(tool,), tool_choice=REQUIRED).calls == "guided_array"


def test_definitions_travel_with_an_elements_schema() -> None:
    defs = {"size": {"type": "integer"}}
    tool = ToolSpec(
        name="f",
        parameters={"type": "object", "properties": {"n": {"$ref": "#/$defs/size"}}, "$defs": defs},
    )
    (call,) = section("glm45", tools=(tool,), tool_choice=REQUIRED).calls
    assert json.loads(call.arguments[0].text) == {"$ref": "#/$defs/size", "$defs": defs}


def test_a_name_that_would_break_markup_is_a_bare_array() -> None:
    tool = ToolSpec(name="f>", parameters=CITY)
    assert guided("qwen3_coder", tools=(tool,), tool_choice=REQUIRED).calls == "guided_array"
    assert section("hermes", tools=(tool,), tool_choice=REQUIRED).begin == ""


def test_tools_that_are_not_strict_leave_auto_alone() -> None:
    found = guidance(tools=(STRICT, CLOCK))
    assert found.form == "free"
    assert found.section is not None
    strict, loose = found.section.calls
    assert json.loads(strict.schema) == CITY
    assert json.loads(loose.schema) == {"type": "object"}
    assert found.section.trigger == "<tool_call>"


def test_strict_tools_in_a_form_without_a_sure_beginning_stay_free() -> None:
    assert guided("llama3_json", tools=(STRICT,)) == Guided(None)
    assert guided("kimi_k2", tools=(STRICT,)) == Guided(None)


def test_a_narrowed_choice_allows_only_its_tools() -> None:
    found = guidance(tools=(WEATHER, CLOCK), tool_choice=ToolChoice("auto", ("clock",)))
    assert found.section is not None
    assert [call.begin for call in found.section.calls] == ['<tool_call>\n{"name": "clock", "arguments": ']


def test_json_answers_leave_room_for_calls() -> None:
    found = guidance(tools=(WEATHER,), output_format=JSON_ANSWER)
    assert found.form == "json_schema"
    assert found.section is not None
    assert found.section.calls[0].schema == '{"type":"object"}'
    assert guided("kimi_k2", tools=(WEATHER,), output_format=JSON_ANSWER).calls == "guided_array"


def test_an_array_as_answer_is_never_taken_for_calls() -> None:
    wanted = OutputFormat(kind="json_schema", schema={"type": "array"})
    found = guided("kimi_k2", tools=(WEATHER,), output_format=wanted)
    assert found.calls == "auto"
    assert found.guidance is not None
    assert found.guidance.section is None


def test_without_tools_to_choose_from_markup_is_dropped() -> None:
    assert guided(tools=(STRICT,), tool_choice=ToolChoice("none")) == Guided(None, "drop")
    found = guided(tools=(STRICT,), tool_choice=ToolChoice("none"), output_format=JSON_ANSWER)
    assert found.calls == "drop"
    assert found.guidance is not None
    assert found.guidance.section is None


def test_thoughts_come_before_the_answer() -> None:
    think = (FreeBlock(begin="<think>", end="</think>"),)
    opened = guidance("hermes", "qwen3", True, output_format=JSON_ANSWER)
    assert (opened.blocks, opened.open_block) == (think, True)
    unsaid = guidance("hermes", "qwen3", None, output_format=JSON_ANSWER)
    assert (unsaid.blocks, unsaid.open_block) == (think, False)
    closed = guidance("hermes", "qwen3", False, output_format=JSON_ANSWER)
    assert closed.blocks == ()
    assert guidance("hermes", "mistral", True, output_format=JSON_ANSWER).blocks[0].end == "[/THINK]"


def test_free_text_holds_thoughts_as_it_is() -> None:
    assert guidance("hermes", "qwen3", True, tools=(STRICT,)).blocks == ()


def test_a_channel_leads_to_the_answer() -> None:
    assert guidance(None, "gpt_oss", None, output_format=JSON_ANSWER).lead == "<|channel|>final<|message|>"


def test_calls_stand_in_the_frame_of_text_only_in_a_foreign_form() -> None:
    assert section("harmony", tools=(WEATHER,), tool_choice=REQUIRED).begin == ""
    odd = ToolSpec(name="a b", parameters=CITY)
    assert section("harmony", tools=(odd,), tool_choice=REQUIRED).begin == "<|channel|>final<|message|>["


def test_a_custom_tools_grammar_binds_where_text_is_written_as_it_is() -> None:
    (call,) = section("qwen3_coder", tools=(FREE_FORM,), tool_choice=REQUIRED).calls
    (text,) = call.arguments
    assert (text.begin, text.kind, text.text) == ("<parameter=input>\n", "lark", 'start: "x"+')
    assert call.param == "tools[0].custom.format.grammar"


@pytest.mark.parametrize("form", ["hermes", "harmony", "kimi_k2", None])
def test_a_custom_tool_with_a_grammar_is_its_bare_text_where_calls_are_json(form: str | None) -> None:
    found = guided(form, tools=(FREE_FORM,), tool_choice=REQUIRED)
    assert found.calls == "guided_text:input:patch"
    assert found.guidance is not None
    assert (found.guidance.form, found.guidance.text) == ("lark", 'start: "x"+')
    assert found.guidance.param == "tools[0].custom.format.grammar"
    assert found.guidance.lead == ("<|channel|>final<|message|>" if form == "harmony" else "")


def test_beside_other_tools_a_custom_tool_is_a_call_like_any_other() -> None:
    patch, _ = section(tools=(FREE_FORM, WEATHER), tool_choice=REQUIRED).calls
    assert json.loads(patch.schema)["required"] == ["input"]


def test_a_custom_tool_of_an_answer_in_a_frame_is_an_ordinary_call() -> None:
    (patch,) = section("cohere_command", tools=(FREE_FORM,), tool_choice=REQUIRED).calls
    assert json.loads(patch.schema)["required"] == ["input"]


def test_a_custom_tools_pattern_binds_within_json() -> None:
    tool = ToolSpec(name="pick", custom=True, grammar=Grammar("regex", "a|b"))
    (call,) = section(tools=(tool,), tool_choice=REQUIRED).calls
    assert json.loads(call.schema)["properties"]["input"]["pattern"] == "^(?:a|b)$"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objct"}, "'type' must be one or more of"),
        ({"type": "object", "properties": []}, "'properties' must be an object of schemas (at #/properties)"),
        ({"properties": {"a": 5}}, "a number is not a schema"),
        ({"required": "a"}, "'required' must be a list of strings"),
        ({"anyOf": []}, "'anyOf' must be a list of at least one schema"),
        ({"enum": []}, "'enum' must be a list of at least one value"),
        ({"minLength": -1}, "'minLength' must be a whole number from 0 on"),
        ({"$ref": "#/$defs/a"}, "is no schema within this one"),
        ({"$ref": "https://example.com/schema.json"}, "is no schema within this one"),
        ({"items": {"items": {"pattern": 1}}}, "(at #/items/items/pattern)"),
    ],
)
def test_what_is_no_schema_is_refused_and_says_where(schema: dict[str, Any], problem: str) -> None:
    error = refused(output_format=OutputFormat(kind="json_schema", schema=schema))
    assert (error.status, error.param, error.code) == (400, "response_format", "invalid_json_schema")
    assert problem in error.message


def test_errors_name_fields_as_the_api_spells_them() -> None:
    broken = {"type": "object", "properties": []}
    asking = conversation(output_format=OutputFormat(kind="json_schema", schema=broken))
    calling = conversation(tools=(CLOCK, ToolSpec(name="f", parameters=broken)), tool_choice=REQUIRED)
    for fields, output, parameters in (
        (FIELDS["responses"], "text.format", "tools[1].parameters"),
        (FIELDS["messages"], "output_config.format", "tools[1].input_schema"),
    ):
        for wanted, param in ((asking, output), (calling, parameters)):
            with pytest.raises(InvalidRequest) as caught:
                guidance_of(wanted, tool="hermes", reasoning=None, reasoning_open=None, fields=fields)
            assert caught.value.param == param


def test_arguments_are_always_an_object() -> None:
    error = refused(tools=(ToolSpec(name="f", parameters={"type": "string"}),), tool_choice=REQUIRED)
    assert error.param == "tools[0].function.parameters"
    (call,) = section(tools=(ToolSpec(name="f"),), tool_choice=REQUIRED).calls
    assert json.loads(call.schema) == {"type": "object"}


def test_broken_schemas_of_tools_that_are_left_alone_do_no_harm() -> None:
    assert guided(tools=(ToolSpec(name="f", parameters={"type": "objct"}),)) == Guided(None)


@pytest.mark.parametrize(
    ("limits", "code"),
    [(SchemaLimits(size_bytes=60), "schema_too_large"), (SchemaLimits(depth=2), "invalid_json_schema")],
)
def test_schemas_are_limited(limits: SchemaLimits, code: str) -> None:
    nested: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}
    wanted = conversation(output_format=OutputFormat(kind="json_schema", schema=nested))
    with pytest.raises(InvalidRequest) as caught:
        guidance_of(wanted, tool=None, reasoning=None, reasoning_open=None, limits=limits)
    assert caught.value.code == code
    larger = SchemaLimits(size_bytes=limits.size_bytes + 60, depth=limits.depth + 1)
    guidance_of(wanted, tool=None, reasoning=None, reasoning_open=None, limits=larger)


def test_recursive_schemas_are_fine() -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert json.loads(guidance(output_format=OutputFormat(kind="json_schema", schema=tree)).text) == tree


def test_an_answer_that_the_request_has_begun_cannot_be_json_by_a_schema() -> None:
    assert refused(output_format=JSON_ANSWER, continue_final=True).param == "response_format"
