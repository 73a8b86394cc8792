"""What holds for every format and any output.

Nothing raises, no way to cut it matters, no word is lost, events are in order, and the work is linear.
"""

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, FinishReason, Parser, open_parser
from kvbus_parsers.collect import Collected, collect
from kvbus_parsers.names import reasoning_formats, tool_formats

TOOL_FORMATS = sorted({known.name for known in tool_formats().values()})
REASONING_FORMATS = sorted({known.name for known in reasoning_formats().values()})

FINISHES: list[FinishReason] = ["stop", "length"]

COMMON = [
    "\n",
    " ",
    "<",
    ">",
    "</",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    ":",
    ",",
    "=",
    "(",
    ")",
    "\\",
    "é",
    "\U0001f680",
    "<think>",
    "</think>",
]


def _markers(tool: str) -> list[str]:
    known = tool_formats()[tool]
    return [*known.openers, *known.strays, *known.framing]


def _open(tool: str | None = None, reasoning: str | None = None, **options: Any) -> Parser:
    counter = itertools.count()
    return open_parser(tool=tool, reasoning=reasoning, new_id=lambda: f"id{next(counter)}", **options)


def _run(parser: Parser, chunks: list[str], finish: FinishReason) -> Collected:
    events: list[Event] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    events += parser.finish(finish)
    _check_order(events)
    return collect(events, finish)


def _check_order(events: list[Event]) -> None:
    """Calls do not overlap, their deltas lie inside them, and the end of a call repeats what its deltas said."""
    calls = 0
    started: CallStarted | None = None
    arguments = ""
    for event in events:
        match event:
            case CallStarted():
                assert event.index == calls
                assert event.name
                started, arguments, calls = event, "", calls + 1
            case CallArguments():
                assert started
                assert event.index == started.index
                assert event.text
                arguments += event.text
            case CallEnded():
                assert started
                assert (event.index, event.id, event.name, event.arguments) == (
                    started.index,
                    started.id,
                    started.name,
                    arguments,
                )
                assert event.arguments
                started = None


def _said(collected: Collected) -> str:
    calls = [f"{call.id} {call.name} {call.arguments}" for call in collected.tool_calls]
    return " ".join([collected.content or "", collected.reasoning or "", *calls])


@pytest.mark.parametrize("tool", TOOL_FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_garbage_is_read_the_same_however_it_is_cut_and_no_word_of_it_is_lost(
    tool: str, data: st.DataObject
) -> None:
    words = (f"w{number}w" for number in itertools.count())
    pieces = data.draw(st.lists(st.sampled_from([*_markers(tool) * 2, *COMMON, "WORD", "WORD", "WORD"]), max_size=25))
    pieces = [next(words) if piece == "WORD" else piece for piece in pieces]
    reasoning = data.draw(st.sampled_from([None, "qwen3", "deepseek_r1"]))
    finish: FinishReason = data.draw(st.sampled_from(FINISHES))
    text = "".join(pieces)
    whole = _run(_open(tool, reasoning), [text], finish)
    assert _run(_open(tool, reasoning), pieces, finish) == whole
    assert _run(_open(tool, reasoning), list(text), finish) == whole
    if finish == "stop":
        said = _said(whole)
        text = re.sub(r"<function=[^<>\n]*(?=[<\n])", "", text)  # a header without its end is markup
        assert [word for word in re.findall(r"w\d+w", text) if word not in said] == []


@pytest.mark.parametrize("name", REASONING_FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_garbage_in_reasoning_is_kept(name: str, data: st.DataObject) -> None:
    known = reasoning_formats()[name]
    marks = [*known.openers, *known.closers, *known.framing]
    pieces = data.draw(st.lists(st.sampled_from([*marks, *COMMON[:12], "word", "word"]), max_size=20))
    opened = data.draw(st.sampled_from([None, True, False]))
    text = "".join(pieces)
    whole = _run(_open(reasoning=name, reasoning_open=opened), [text], "stop")
    assert _run(_open(reasoning=name, reasoning_open=opened), list(text), "stop") == whole
    assert _said(whole).count("word") == text.count("word")


@pytest.mark.parametrize("tool", TOOL_FORMATS)
def test_the_work_grows_linearly_with_the_output(tool: str) -> None:
    marks = _markers(tool) or ["["]
    units = [
        "a <b " + "".join(marks[:6]),
        marks[0] + "{",
        marks[0] + ' {"name": "f", "arguments": {"a": "',
        marks[0] + "x\n ",
        '[{"name": "f", ',
        "[f(a=[",
        "<" * 7,
        *(f"{mark} " for mark in marks[:6]),
    ]
    for unit in units:
        once, twice = (_scanned(tool, unit * repeats) for repeats in (30, 60))
        assert twice <= 2.5 * once + 1000, unit


def _scanned(tool: str, text: str) -> int:
    parser = _open(tool, "qwen3")
    for character in text:
        parser.feed(character)
    parser.finish("stop")
    return parser._source.scanned


_OF_JSON_TAGS = (
    "cohere_command",
    "default",
    "ernie45",
    "gigachat3",
    "granite",
    "granite_20b_fc",
    "hermes",
    "jamba",
    "longcat",
)
_CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("tool", [*_OF_JSON_TAGS, "nemotron_deci"])
@settings(max_examples=60)
@given(data=st.data())
def test_text_behind_a_call_is_kept_to_the_last_bracket(tool: str, data: st.DataObject) -> None:
    """An opener without a call behind it is text, and so are the brackets before it."""
    openers = list(tool_formats()[tool].openers)
    pieces = st.sampled_from(["]", "}", "]]", "w", " w ", "\n", *openers])
    text = "".join(data.draw(st.lists(pieces, min_size=1, max_size=6)))
    text = f"{text}w"  # nothing that stands behind an opener here begins a call
    output = data.draw(st.sampled_from(openers)) + _CALL + text
    assert _run(_open(tool), list(output), "stop") == _run(_open(tool), [output], "stop")
    said = _run(_open(tool), [output], "stop")
    assert [call.name for call in said.tool_calls] == ["f"]
    assert "".join((said.content or "").split()) == "".join(text.split())
