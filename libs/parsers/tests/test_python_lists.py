"""Calls written as Python: where a bracket begins calls and where it is prose, calls between markers, cut and broken calls."""

from typing import Any

import pytest

from kvbus_parsers import FinishReason, open_parser
from kvbus_parsers.collect import CallSegment, collect

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def segments(tool: str, text: str, finish: FinishReason = "stop", **options: Any) -> list[Any]:
    """Text, or (name, arguments), with "cut" for calls that did not end; the same for any pieces."""
    found = []
    for size in (len(text), 1, 2, 3):
        parser = open_parser(tool=tool, tools=TOOLS, **options)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        found.append(
            [
                (segment.name, segment.arguments, *([] if segment.complete else ["cut"]))
                if isinstance(segment, CallSegment)
                else segment.text
                for segment in collect(events + parser.finish(finish), finish).segments
            ]
        )
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[f(a=1), g.h(b="x")] and text', [("f", '{"a": 1}'), ("g.h", '{"b": "x"}'), "and text"]),
        ("  [ f ( a = 1 , ) , ] t", [("f", '{"a": 1}'), "t"]),
        ("[f(a=1)\n my-tool(b=2)]", [("f", '{"a": 1}'), ("my-tool", '{"b": 2}')]),
        ("[unknown()]", [("unknown", "{}")]),
        ("[f(a=1)", [("f", '{"a": 1}')]),
        ("[f(from=1, class='x')]", [("f", '{"from": 1, "class": "x"}')]),
    ],
)
def test_a_list_of_calls_begins_the_content(text: str, wanted: list[Any]) -> None:
    assert segments("pythonic", text) == wanted
    assert segments("llama4_pythonic", text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '["a"]',
        "[1](2) [see](http://x) [f](y)",
        "[see()](http://x)",
        "[f('x')]",
        "[f(x) for x in y]",
        "[f(a==1)]",
        "[f",
        "[f()",
        "text [unknown(a=1)]",
        "[",
        "[ [",
    ],
)
def test_a_list_that_is_no_list_of_calls_is_text(text: str) -> None:
    assert segments("pythonic", text) == [text]


def test_inside_prose_only_offered_tools_are_called() -> None:
    assert segments("pythonic", "Sure [g(a=1)]:\n[f(b=2)] ok") == ["Sure [g(a=1)]:", ("f", '{"b": 2}'), "ok"]
    assert segments("pythonic", "[[f(a=1)]]") == ["[", ("f", '{"a": 1}'), "]"]


def test_what_is_no_call_behind_a_call_is_text() -> None:
    assert segments("pythonic", "[f(a=1), 3] x") == [("f", '{"a": 1}'), ", 3] x"]
    assert segments("pythonic", '[f(a=1), g("x")] x') == [("f", '{"a": 1}'), ', g("x")] x']


def test_a_broken_call_goes_out_raw_and_its_neighbours_survive() -> None:
    assert segments("pythonic", '[f(a=foo(1, ")")), g(x=1)]') == [("f", '{"a": foo(1, ")")}'), ("g", '{"x": 1}')]
    assert segments("pythonic", "[f(a=[1), g(x=1)] t") == [("f", '{"a": [1}'), ("g", '{"x": 1}'), "t"]
    assert segments("pythonic", "[f(a=1] t") == [("f", '{"a": 1'), "t"]


def test_a_cut_call_stays_open_and_a_cut_head_is_a_call_only_of_an_offered_tool() -> None:
    assert segments("pythonic", "[f(a='x", "length") == [("f", '{"a": "x', "cut")]
    assert segments("pythonic", "[f(", "length") == [("f", "{", "cut")]
    assert segments("pythonic", "[see(", "length") == ["[see("]
    assert segments("pythonic", "text [f", "length") == ["text [f"]


def test_a_bracket_in_thoughts_is_thought() -> None:
    assert segments("pythonic", "<think>[f(a=1)]</think>x", reasoning="qwen3") == ["[f(a=1)]", "x"]


MARKED = {
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


@pytest.mark.parametrize("tool", MARKED)
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ("[f(a=1), g()]", [("f", '{"a": 1}'), ("g", "{}")]),
        ("\nf(a=1)\ng(b=[1,\n2])\n", [("f", '{"a": 1}'), ("g", '{"b": [1, 2]}')]),
        ("f(a=1); g()", [("f", '{"a": 1}'), ("g", "{}")]),
        ("f(a=1)]", [("f", '{"a": 1}')]),
        ('[{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ("[]", []),
        ('g("x")', [("g", '{"x"}')]),
        ("[f(a=1", [("f", '{"a": 1')]),
        ("f(a=1)\nnonsense here\ng()", [("f", '{"a": 1}'), "nonsense here", ("g", "{}")]),
    ],
)
def test_calls_stand_between_markers_in_any_dress(tool: str, body: str, calls: list[Any]) -> None:
    opener, closer = MARKED[tool]
    assert segments(tool, f"a {opener}{body}{closer} b") == (["a", *calls, "b"] if calls else ["ab"])
    assert segments(tool, f"{opener}f(){closer}\n{opener}{body}{closer}") == [("f", "{}"), *calls]


@pytest.mark.parametrize("tool", MARKED)
def test_a_marker_in_prose_is_text(tool: str) -> None:
    text = f"write {MARKED[tool][0]} first"
    assert segments(tool, text) == [text]


def test_a_missing_closer_is_forgiven() -> None:
    assert segments("olmo3", "<function_calls>f(a=1)\ng()") == [("f", '{"a": 1}'), ("g", "{}")]
    assert segments("llama4_pythonic", "[f(a=1)]<|python_end|> x") == [("f", '{"a": 1}'), "x"]
