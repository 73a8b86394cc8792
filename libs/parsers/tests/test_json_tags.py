"""Calls written as JSON behind a marker: orders of members, spellings, and what models get wrong."""

import json

import pytest

from kvbus_parsers import FinishReason, open_parser
from kvbus_parsers.collect import CallSegment, Collected, TextSegment, collect
from kvbus_parsers.events import CallArguments, CallEnded, CallStarted


def _parse(text: str, tool: str = "hermes", finish: FinishReason = "stop") -> Collected:
    """The result, the same for the whole text and for single characters."""
    results = []
    for chunks in ([text], list(text)):
        minted = iter(range(99))
        parser = open_parser(tool=tool, new_id=lambda ids=minted: f"id{next(ids)}")  # type: ignore[misc]
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        results.append(collect(events + parser.finish(finish), finish))
    assert results[0] == results[1]
    return results[0]


def _calls(text: str, tool: str = "hermes", finish: FinishReason = "stop") -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in _parse(text, tool, finish).tool_calls]


def _body(body: str) -> list[tuple[str, str]]:
    return _calls(f"<tool_call>\n{body}\n</tool_call>")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"a" : 1.50}}', '{"a" : 1.50}'),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"type": "function", "id": "3", "name": "f", "arguments": {"name": "g"}, "extra": [1]}', '{"name": "g"}'),
        ('{"name": "f", "arguments": [1, 2]}', "[1, 2]"),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}', '{"a": 1}'),
        ('{"n\\u0061me": "\\u0066", "arguments": {}}', "{}"),
    ],
)
def test_members_come_in_any_order_and_arguments_in_any_dress(body: str, arguments: str) -> None:
    assert _body(body) == [("f", arguments)]


def test_arguments_stream_as_the_model_writes_them_once_the_name_is_known() -> None:
    parser = open_parser(tool="hermes")
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    started, first = parser.feed('ments": {"a')
    assert isinstance(started, CallStarted)
    assert first == CallArguments(0, '{"a')
    assert parser.feed('": "x') == [CallArguments(0, '": "x')]
    (last,) = parser.feed('"}')
    assert last == CallArguments(0, '"}')
    assert parser.feed("}") == [CallEnded(0, started.id, "f", '{"a": "x"}')]


@pytest.mark.parametrize("text", ["[]", "[ ]", "[] b"])
def test_an_empty_list_behind_a_call_is_text(text: str) -> None:
    parsed = _parse(f'<function_call> {{"name": "f", "arguments": {{}}}}\n{text}', "granite_20b_fc")
    assert ([call.name for call in parsed.tool_calls], parsed.content) == (["f"], text)
    assert _parse("<TOOLCALL>[]</TOOLCALL>", "nemotron_deci").segments == []


def test_a_body_may_hold_several_calls_or_an_array_of_them() -> None:
    two = [("f", "{}"), ("g", '{"a": 1}')]
    assert _body('{"name": "f"}\n{"name": "g", "arguments": {"a": 1}}') == two
    assert _body('[{"name": "f"}, {"name": "g", "arguments": {"a": 1}}]') == two
    assert _body('[{"name": "f"}\n{"name": "g", "arguments": {"a": 1}}]') == two


@pytest.mark.parametrize(
    ("tool", "form"),
    [
        ("hermes", '<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'),
        ("nemotron_deci", '<TOOLCALL>[{{"name": {name}, "arguments": {arguments}}}]</TOOLCALL>'),
        ("xlam", '[{{"name": {name}, "arguments": {arguments}}}]'),
        ("llama3_json", '{{"name": {name}, "parameters": {arguments}}}'),
        ("apertus", "<|tools_prefix|>[{{{name}: {arguments}}}]<|tools_suffix|>"),
    ],
)
def test_a_lone_surrogate_that_json_spells_is_replaced_where_it_is_decoded(tool: str, form: str) -> None:
    text = form.format(name=r'"f\ud83d\ud83d\ude00"', arguments=r'{"a": "\ud83d"}')
    assert _calls(text, tool) == [("f\ufffd😀", r'{"a": "\ud83d"}')]
    text = form.format(name=r'"f\udc00"', arguments=r'"{\"a\": \"\ud83d\"}"')
    assert _calls(text, tool) == [("f\ufffd", '{"a": "\ufffd"}')]


def test_a_brace_too_few_or_too_many_around_whole_arguments_is_forgiven() -> None:
    assert _body('{"name": "f", "arguments": {"a": 1}') == [("f", '{"a": 1}')]
    assert _body('{"name": "f", "arguments": {"a": 1}}}') == [("f", '{"a": 1}')]
    assert _parse('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>done').content == "done"


@pytest.mark.parametrize(
    "text", ["]", "[x]", "] rest", "]\n[x]", "]{x}", '] {"a": 1} is it', "]]\n{x}", "}\n\n{x}", ", {x}", "{x}"]
)
@pytest.mark.parametrize(
    ("tool", "call"),
    [
        ("granite", '<|tool_call|>{"name": "f", "arguments": {}}'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("granite_20b_fc", '<function_call>{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)
def test_brackets_behind_a_call_that_no_call_follows_are_text(tool: str, call: str, text: str) -> None:
    parsed = _parse(call + text, tool)
    assert ([call.name for call in parsed.tool_calls], parsed.content) == (["f"], text)


@pytest.mark.parametrize("between", ["]", "}", "}\n", "],", "]\n<|tool_call|>"])
def test_left_over_brackets_between_two_calls_are_forgiven(between: str) -> None:
    assert _calls(f'<|tool_call|>{{"name": "f"}}{between}{{"name": "g"}}', "granite") == [("f", "{}"), ("g", "{}")]


def test_what_is_no_json_in_arguments_goes_out_raw_and_the_neighbours_are_parsed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert _calls(text) == [("f", '{"a": oops}}'), ("g", "{}")]
    unclosed = '<tool_call>{"name": "f", "arguments": {"a": oops\n<tool_call>{"name": "g"}</tool_call>'
    assert _calls(unclosed) == [("f", '{"a": oops'), ("g", "{}")]
    late = '<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert _calls(late) == [("f", '{"a": 1}oops}'), ("g", "{}")]


def test_a_body_that_breaks_before_its_call_begins_is_text_without_its_markers() -> None:
    parsed = _parse('<tool_call>\n{"name": f, "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>')
    assert [type(segment) for segment in parsed.segments] == [TextSegment, CallSegment]
    assert parsed.content == '{"name": f, "arguments": {}}'
    assert _parse('<tool_call>{"arguments": {}}</tool_call>').content == '{"arguments": {}}'


def test_a_marker_that_no_body_follows_is_a_word() -> None:
    for text in ("Write <tool_call> first.", "Write <tool_call>", "<tool_call> <tool_call> x"):
        assert _parse(text).content == text


@pytest.mark.parametrize("finish", ["length", "stop_sequence"])
def test_a_call_cut_before_its_arguments_leaves_no_trace(finish: FinishReason) -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "f', '<tool_call>{"arguments": {"a": 1}, "na'):
        parsed = _parse(f"Wait. {text}", finish=finish)
        assert (parsed.content, parsed.tool_calls) == ("Wait.", [])


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_cut_call_is_never_closed_up(finish: FinishReason) -> None:
    parsed = _parse('<tool_call>{"name": "f", "arguments": {"path": "a", "body": "x', finish=finish)
    (call,) = parsed.tool_calls
    assert (call.arguments, call.complete) == ('{"path": "a", "body": "x', False)
    assert parsed.finish_reason == finish


def test_a_call_whose_closer_is_missing_is_complete() -> None:
    for finish, reported in (("stop", "tool_calls"), ("length", "length")):
        parsed = _parse('<tool_call>{"name": "f", "arguments": {}}', finish=finish)  # type: ignore[arg-type]
        assert [call.complete for call in parsed.tool_calls] == [True]
        assert parsed.finish_reason == reported


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("nemotron_deci", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>'),
        ("nemotron_deci", '<TOOLCALL><TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL></TOOLCALL>'),
        ("nemotron_deci", '\n[{"name": "f", "arguments": {}}]</TOOLCALL>'),
        ("default", '<|python_tag|>{"name": "f", "parameters": {}}'),
        ("jamba", ' <tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}]'),
        ("granite4", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {}}'),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]'),
        ("internlm2", '<|action_start|> <|plugin|>\n{"name": "f", "parameters": {}}<|action_end|>\n'),
        ("interns1", '<|action_start|><|plugin|>{"name": "f"}<|action_end|>'),
        ("longcat", '<longcat_tool_call>\n{"name": "f", "arguments": {}}\n</longcat_tool_call>'),
        ("ernie45", '<response>\n</response>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'),
    ],
)
def test_each_family_has_its_markers(tool: str, text: str) -> None:
    parsed = _parse(text, tool)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", "{}")]
    assert parsed.content is None


@pytest.mark.parametrize(
    "text", ["functools is a module", "functools[0]", 'functools[{"name": "f"}]', "import functools"]
)
def test_a_plain_word_as_a_marker_stays_in_prose(text: str) -> None:
    assert _parse(text, "phi4").content == text


def test_an_array_that_is_no_list_of_calls_is_an_answer() -> None:
    for text in ('[{"name": "Ann", "age": 3}]', "[1, 2]", "[]", "[see above]"):
        parsed = _parse(text, "nemotron_deci")
        assert (parsed.content, parsed.tool_calls) == (text, [])


def test_code_for_an_interpreter_is_shown_and_no_call() -> None:
    parsed = _parse("<|action_start|><|interpreter|>\nprint(1)<|action_end|>done", "internlm2")
    assert (parsed.content, parsed.tool_calls) == ("print(1)done", [])


def test_a_response_wrapper_is_framing() -> None:
    assert _parse("<response>\nHi.\n</response>\n", "ernie45").content == "Hi."


def test_arguments_with_raw_newlines_are_valid_json_for_the_client() -> None:
    ((_, arguments),) = _body('{"name": "f", "arguments": {"code": "a\nb"}}')
    assert json.loads(arguments) == {"code": "a\nb"}
