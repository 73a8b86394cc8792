"""Whatever schema: what comes out to its end is JSON, and valid."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.call_forms import CALL_FORMS
from kvbus_frontend.core.guidance import guidance_of
from kvbus_parsers import CallEnded, CallStarted, Reasoning, Text, open_parser
from kvbus_parsers.names import reasoning_formats, tool_formats
from kvbus_protocols.conversation import Conversation, OutputFormat, TextPart, ToolChoice, ToolSpec, Turn
from kvbus_protocols.generation import GenerationRequest
from kvbus_wire.guidance import Guidance
from tests.property.guidance.conftest import Follows, Generate, tool

NAMES = st.text("abcdefghij_", min_size=1, max_size=6)
QUICK = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    texts = st.text('ab"\\\n<é', max_size=4)
    small = st.integers(0, 4)
    fixed: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
        {"type": "string", "format": "date"},
        {"const": {"a": [1]}},
    ]
    return st.one_of(
        st.sampled_from(fixed),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-99, 99), small
        ),
        st.builds(lambda low: {"type": "number", "minimum": low, "exclusiveMaximum": low + 2}, st.integers(-9, 9)),
        st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, small, small),
        st.builds(lambda values: {"enum": values}, st.lists(texts | small, min_size=1, max_size=4, unique_by=str)),
    )


def arrays(items: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
        items,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: Mapping[str, Any], needed: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": dict(properties),
            "required": list(properties)[:needed],
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(NAMES, values, max_size=3), st.integers(0, 3))


SCHEMAS = st.recursive(
    leaves(),
    lambda inner: st.one_of(objects(inner), arrays(inner), st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)),
    max_leaves=4,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Schemas of objects, part of them by reference."""
    schema = draw(objects(SCHEMAS))
    shared = draw(SCHEMAS)
    return {
        **schema,
        "properties": {**schema["properties"], "shared": {"$ref": "#/$defs/shared"}},
        "$defs": {"shared": shared},
    }


def conversation(**fields: Any) -> Conversation:
    return Conversation(generation=GenerationRequest(model="m"), turns=(Turn("user", (TextPart("hi"),)),), **fields)


def guidance_for(
    tool_format: str | None, reasoning: str | None = None, reasoning_open: bool | None = None, **fields: Any
) -> tuple[Guidance, str]:
    guided = guidance_of(conversation(**fields), tool=tool_format, reasoning=reasoning, reasoning_open=reasoning_open)
    assert guided.guidance is not None
    return guided.guidance, guided.calls


@QUICK
@given(schema=documents(), seed=st.integers(0, 2**32))
def test_json_answers_are_valid(generate: Generate, schema: dict[str, Any], seed: int) -> None:
    guidance, _ = guidance_for(None, output_format=OutputFormat(kind="json_schema", schema=schema, strict=True))
    text, end = generate(guidance, seed)
    assert end.reason == "stop"
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("form", sorted({*CALL_FORMS, "kimi_k2", "pythonic"}))
@settings(QUICK, max_examples=2)
@given(first=documents(), second=documents(), parallel=st.booleans(), named=st.booleans(), seed=st.integers(0, 2**32))
def test_required_calls_are_valid_in_every_form(
    generate: Generate,
    form: str,
    first: dict[str, Any],
    second: dict[str, Any],
    parallel: bool,
    named: bool,
    seed: int,
) -> None:
    schemas = {"first_tool": first, "second-tool": second}
    guidance, mode = guidance_for(
        form,
        reasoning_open=False,
        tools=tuple(ToolSpec(name=name, parameters=schema) for name, schema in schemas.items()),
        tool_choice=ToolChoice("required", ("second-tool",) if named else (), named=named),
        parallel_tool_calls=parallel,
    )
    text, end = generate(guidance, seed)
    parser = open_parser(tool=form, tools=[tool(*item) for item in schemas.items()], calls=mode)
    events = [*parser.feed(text), *parser.finish("stop" if end.reason == "stop" else "length")]
    calls = [event for event in events if isinstance(event, CallEnded)]
    assert not [event for event in events if isinstance(event, Text) and event.text.strip()], text
    assert calls or end.reason == "length"
    for call in calls:
        assert call.name == "second-tool" or not named
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    if not parallel:
        assert len([event for event in events if isinstance(event, CallStarted)]) <= 1


def test_thoughts_of_every_format_are_told_from_the_answer(follows: Follows) -> None:
    fields: dict[str, Any] = {"output_format": OutputFormat(kind="json_object")}
    for reasoning in sorted({known.name for known in reasoning_formats().values() if known.openers}):
        guidance, _ = guidance_for(None, reasoning, **fields)
        for block in guidance.blocks:
            begin = "" if guidance.open_block else block.begin
            text = f'{begin}Why?{block.end}\n\n{guidance.lead}{{"ok": 1}}{guidance.tail}'
            assert follows(guidance, text), reasoning
            assert not follows(guidance, text.replace('"ok"', "ok"))
            parser = open_parser(reasoning=reasoning)
            events = [*parser.feed(text), *parser.finish("stop")]
            assert "".join(event.text for event in events if isinstance(event, Text)) == '{"ok": 1}', reasoning
            assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Why?", reasoning


def test_every_format_reads_calls_that_are_forced_on_it() -> None:
    """The bare array, for formats whose own calls cannot be given as guidance."""
    fields: dict[str, Any] = {"tools": (ToolSpec(name="f"),), "tool_choice": ToolChoice("required")}
    for form in sorted({known.name for known in tool_formats().values()} - set(CALL_FORMS)):
        guidance, mode = guidance_for(form, **fields)
        assert guidance.section is not None
        (call,) = guidance.section.calls
        array = f"{guidance.section.begin}{call.begin}{{}}{call.end}{guidance.section.end}"
        parser = open_parser(tool=form, calls=mode)
        events = [*parser.feed(array), *parser.finish("stop")]
        assert [(event.name, event.arguments) for event in events if isinstance(event, CallEnded)] == [("f", "{}")], (
            form
        )
