"""The parser as a whole: options of a request, events in order, white space, ids."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, Text, UnknownFormatError, open_parser
from kvbus_parsers.collect import Collected, collect
from kvbus_parsers.sink import Sink

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def _parse(
    text: str,
    *,
    tool: str | None = "hermes",
    reasoning: str | None = None,
    calls: str = "auto",
    opened: bool | None = None,
) -> Collected:
    """The result, the same for the whole text and for single characters."""
    results = []
    for chunks in ([text], list(text)):
        parser = open_parser(tool=tool, reasoning=reasoning, calls=calls, reasoning_open=opened, new_id=lambda: "id")
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        results.append(collect(events + parser.finish("stop")))
    assert results[0] == results[1]
    return results[0]


def _calls(parsed: Collected) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.tool_calls]


@given(st.text(max_size=20))
def test_without_formats_the_output_is_text(text: str) -> None:
    assert _parse(text, tool=None).content == (text or None)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match=r"tool-call.*'herms'"):
        open_parser(tool="herms")
    with pytest.raises(UnknownFormatError, match=r"reasoning.*'herms'"):
        open_parser(reasoning="herms")


def test_names_are_found_however_they_are_spelled() -> None:
    for name in ("DeepSeek-R1", "deepseek_r1", "deepseek.r1"):
        assert open_parser(reasoning=name).in_reasoning


def test_adjacent_deltas_of_one_feed_are_one_event() -> None:
    parser = open_parser(tool="hermes")
    assert parser.feed("a <b <tool_ca c") == [Text("a <b <tool_ca c")]
    started, arguments, ended = parser.feed(CALL)
    assert isinstance(started, CallStarted)
    assert arguments == CallArguments(0, '{"a": 1}')
    assert isinstance(ended, CallEnded)


def test_white_space_that_touches_a_marker_is_framing_and_other_white_space_is_text() -> None:
    assert _parse(" a \n\n b ").content == " a \n\n b "
    assert _parse(f" a \n\n{CALL}\n\n b ").content == " ab "
    assert _parse(f"{CALL}\n \n{CALL}\n").content is None


def test_white_space_is_held_only_until_it_is_known_what_follows() -> None:
    parser = open_parser(tool="hermes")
    assert parser.feed("a ") == [Text("a")]
    assert parser.feed("\n") == []
    assert parser.feed("b") == [Text(" \nb")]
    assert parser.feed(" ") == []
    assert parser.finish("stop") == [Text(" ")]


def test_the_indexes_count_from_zero_and_the_ids_are_unique() -> None:
    parsed = _parse(CALL * 3)
    assert [call.index for call in parsed.tool_calls] == [0, 1, 2]
    assert len({call.id for call in parsed.tool_calls}) == 3
    (started, *_) = open_parser(tool="hermes").feed(CALL)
    assert isinstance(started, CallStarted)
    assert started.id.startswith("call_")
    assert len(started.id) == len("call_") + 24


def test_ids_are_of_the_shape_that_the_templates_of_the_family_take_back() -> None:
    ids = set()
    for _ in range(20):
        started, *_ = open_parser(tool="mistral").feed('[TOOL_CALLS]f{"a": 1}')
        assert isinstance(started, CallStarted)
        assert re.fullmatch("[a-zA-Z0-9]{9}", started.id)
        ids.add(started.id)
    assert len(ids) == 20


def test_a_dropped_call_leaves_the_prose_around_it_and_no_markup() -> None:
    parsed = _parse(f"The tide is low.\n{CALL}\n{CALL} I checked.", calls="drop")
    assert (parsed.content, parsed.tool_calls, parsed.finish_reason) == ("The tide is low.\nI checked.", [], "stop")
    broken = _parse('<tool_call>{"name": f}</tool_call>', calls="drop")
    assert broken.content == '{"name": f}'


GUIDED = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'


@pytest.mark.parametrize("tool", ["hermes", "llama3_json", "harmony", "mistral", "qwen3_coder", None])
def test_guided_output_is_an_array_of_calls_whatever_the_format(tool: str | None) -> None:
    assert _calls(_parse(GUIDED, tool=tool, calls="guided_array")) == [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize("tool", ["hermes", "llama3_json", "harmony", "pythonic", None])
def test_guided_arguments_are_those_of_the_named_tool(tool: str | None) -> None:
    text = '{"name": "x", "arguments": {}}'
    assert _calls(_parse(text, tool=tool, calls="guided_arguments:f")) == [("f", text)]


def test_guided_output_may_follow_reasoning() -> None:
    parsed = _parse(f"A</think>\n\n{GUIDED}", reasoning="qwen3", calls="guided_array", opened=True)
    assert (parsed.reasoning, len(parsed.tool_calls), parsed.content) == ("A", 2, None)
    parsed = _parse('<think>A</think> {"a": 1}', reasoning="qwen3", calls="guided_arguments:f")
    assert (parsed.reasoning, _calls(parsed)) == ("A", [("f", '{"a": 1}')])


def test_an_engine_without_guidance_is_read_by_the_format() -> None:
    assert _calls(_parse(f"Well. {CALL}", calls="guided_array")) == [("f", '{"a": 1}')]
    assert _calls(_parse(CALL, calls="guided_arguments:g")) == [("f", '{"a": 1}')]


def test_guided_arguments_that_are_cut_stay_open() -> None:
    parser = open_parser(tool="hermes", calls="guided_arguments:f")
    events: list[Event] = parser.feed('{"a": "x') + parser.finish("length")
    (call,) = collect(events, "length").tool_calls
    assert (call.arguments, call.complete) == ('{"a": "x', False)


def test_an_end_in_the_middle_of_a_marker_is_text() -> None:
    for reasoning, text in ((None, "a <tool_c"), ("qwen3", "a </thin")):
        assert _parse(text, reasoning=reasoning).content == text


def test_reasoning_and_text_of_one_feed_are_separate_events() -> None:
    kinds = [type(event) for event in open_parser(reasoning="qwen3").feed("<think>a</think>b")]
    assert kinds.index(Reasoning) < kinds.index(Text)


def test_empty_prose_says_nothing() -> None:
    sink = Sink()
    sink.prose("")
    sink.finish()
    assert sink.drain() == []


def test_feeding_after_the_grammar_ended_or_feeding_nothing_does_no_harm() -> None:
    parser = open_parser(tool="hermes")
    assert parser.feed("") == []
    assert parser.feed("a") == [Text("a")]
    assert parser.finish("stop") == []
    assert parser.finish("stop") == []
