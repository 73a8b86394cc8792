"""Output that is one argument of a named tool, as plain text."""

import json

import pytest

from kvbus_parsers import Event, open_parser
from kvbus_parsers.collect import Collected, collect

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def _parse(text: str, *, tool: str | None = "hermes", reasoning: str | None = None, calls: str) -> Collected:
    parser = open_parser(tool=tool, reasoning=reasoning, calls=calls)
    return collect(parser.feed(text) + parser.finish("stop"), "stop")


def _calls(parsed: Collected) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize("tool", ["hermes", "harmony", "qwen3_coder", None])
def test_guided_text_is_one_argument_of_the_named_tool(tool: str | None) -> None:
    text = 'say "hi"\n\\o/ <é>\n'
    (call,) = _parse(text, tool=tool, calls="guided_text:input:say").tool_calls
    assert (call.name, call.complete, json.loads(call.arguments)) == ("say", True, {"input": text})


def test_guided_text_may_follow_reasoning_and_is_never_closed_up_when_it_is_cut() -> None:
    parsed = _parse("<think>A</think>\n\nabc", reasoning="qwen3", calls="guided_text:input:say")
    assert (parsed.reasoning, _calls(parsed)) == ("A", [("say", '{"input": "abc"}')])
    parser = open_parser(calls="guided_text:input:say")
    events: list[Event] = parser.feed("ab") + parser.feed("c") + parser.finish("length")
    (call,) = collect(events, "length").tool_calls
    assert (call.arguments, call.complete) == ('{"input": "abc', False)


def test_guided_text_of_an_engine_without_guidance_is_read_by_the_format() -> None:
    assert _calls(_parse(CALL, calls="guided_text:input:g")) == [("f", '{"a": 1}')]
    assert _parse("", calls="guided_text:input:g").tool_calls == []
