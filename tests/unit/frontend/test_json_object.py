"""JSON objects as models write them, piece by piece: what comes out is one in the end, and nothing is lost."""

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.json_object import INVALID_JSON, MAX_NUMBER, ObjectText, as_object, complete_members

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
LIKE_JSON = st.text(alphabet='{}[]:,"\\ tru1-e.a\n', max_size=30)


def texts_of(objects: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[str]:
    return st.builds(json.dumps, objects, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1]))


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("text", "handed_on", "end"),
    [
        ("{}", "", "{}"),
        ('{"a": 1', "", ""),
        ('{"a": "x', '{"a": "x', ""),
        ('{"a": "x\\', '{"a": "x', ""),
        ('{"a": "x", "b', '{"a": "x"', ""),
        ('{"a": [1, [2', '{"a": [1, [', ""),
        ('{"a": "x"}', '{"a": "x"', "}"),
        ('{"a": "x"} \n', '{"a": "x"', "} \n"),
        ('{"a": tru', "", ""),
    ],
)
def test_what_may_turn_out_to_be_no_json_waits(text: str, handed_on: str, end: str) -> None:
    written = ObjectText()
    assert written.feed(text) == handed_on
    if end:
        assert written.end() == end
    else:
        assert handed_on + written.rest() == text


@pytest.mark.parametrize(
    ("text", "object_text"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ("just text", '{"INVALID_JSON": "just text"}'),
        ("null", '{"INVALID_JSON": "null"}'),
        ('["Brest"]', '{"INVALID_JSON": "[\\"Brest\\"]"}'),
        ("{'a': 1}", '{"INVALID_JSON": "{\'a\': 1}"}'),
        ('{"a": 01}', '{"INVALID_JSON": "{\\"a\\": 01}"}'),
        ('{"a": 1,}', '{"a": 1, "INVALID_JSON": "{\\"a\\": 1,}"}'),
        ('{"a": [1, {"b": 2]}', '{"a": [1, {"b": 2}], "INVALID_JSON": "{\\"a\\": [1, {\\"b\\": 2]}"}'),
        ('{"a": "bad \\x"}', '{"a": "bad ", "INVALID_JSON": "{\\"a\\": \\"bad \\\\x\\"}"}'),
        ('{"a": "never ends', '{"a": "never ends", "INVALID_JSON": "{\\"a\\": \\"never ends"}'),
        ('{"a": 1} {"b": 2}', '{"a": 1, "INVALID_JSON": "{\\"a\\": 1} {\\"b\\": 2}"}'),
        ('{"a": "tab\there\x00"}', '{"a": "tab\\there\\u0000"}'),
        ('{"a": ' + "9" * MAX_NUMBER + "}", '{"a": ' + "9" * MAX_NUMBER + "}"),
        ('{"a": ' + "9" * (MAX_NUMBER + 1) + "}", '{"INVALID_JSON": "{\\"a\\": ' + "9" * (MAX_NUMBER + 1) + '}"}'),
    ],
)
def test_what_is_no_object_becomes_one_that_says_so(text: str, object_text: str) -> None:
    assert as_object(text) == object_text


@given(texts_of(OBJECTS), st.data())
def test_an_object_comes_out_as_it_was_written(text: str, data: st.DataObject) -> None:
    written = ObjectText()
    assert "".join(map(written.feed, pieces_of(text, data))) + written.end() == text


@given(
    LIKE_JSON | texts_of(OBJECTS).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])), st.data()
)
def test_any_text_comes_out_whole_as_an_object_however_it_is_cut(text: str, data: st.DataObject) -> None:
    written = ObjectText()
    whole = "".join(map(written.feed, pieces_of(text, data))) + written.end()
    assert whole == as_object(text)
    read = json.loads(whole)
    try:
        told: Any = json.loads(text, strict=False)
    except ValueError:
        told = None
    if isinstance(told, dict):
        assert read == told
    elif text.strip():
        assert read[INVALID_JSON] == text


@given(LIKE_JSON | texts_of(OBJECTS), st.data())
def test_a_reader_of_some_pieces_never_holds_what_can_be_no_json(text: str, data: st.DataObject) -> None:
    written, held = ObjectText(), ""
    for piece in pieces_of(text, data):
        held += written.feed(piece)
        if held:
            json.loads(held + '"' * _is_in_string(held) + _closers(held))


def _is_in_string(text: str) -> bool:
    return text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1


def _closers(text: str) -> str:
    """Of what comes out, which never ends behind a comma, a colon or in a key."""
    stack, in_string, escaped = [], False, False
    for mark in text:
        if in_string:
            in_string, escaped = escaped or mark != '"', not escaped and mark == "\\"
        elif mark == '"':
            in_string = True
        elif mark in "{[":
            stack.append("}" if mark == "{" else "]")
        elif mark in "}]":
            stack.pop()
    return "".join(reversed(stack))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a":', {}),
        ('{"a": "x', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x", "b": tr', {"a": "x"}),
        ('{"a": true, "b": {"c": null, "d": "y', {"a": True, "b": {"c": None}}),
        ('{"a": [1, [2.5e1], "z', {"a": [1, [25.0]]}),
        ('{"a": 12', {"a": 12}),
        ('{"a": 1.', {}),
        ('{"a": -', {}),
        ('{"a": 1, "a": 2', {"a": 2}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": 1 "b": 2}', {"a": 1}),
        ('{"a": 01}', {}),
        ("{a: 1}", {}),
        ("[1, 2]", {}),
        ('"text"', {}),
        ("Paris", {}),
    ],
)
def test_only_what_is_complete_comes_out(text: str, part: dict[str, Any]) -> None:
    assert json.loads(complete_members(text)) == part


@given(OBJECTS, st.data())
def test_a_cut_object_is_read_as_the_official_client_reads_it(whole: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(whole, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(1, len(text)))]
    try:
        expected = jiter.from_json(cut.encode(), partial_mode=True)
    except (ValueError, UnicodeEncodeError):  # that client has no half surrogate pairs
        return
    assert json.loads(complete_members(cut)) == expected


@given(texts_of(OBJECTS))
def test_a_whole_object_comes_out_whole(text: str) -> None:
    assert complete_members(text) == text


@given(LIKE_JSON)
def test_no_text_makes_it_fail(text: str) -> None:
    assert isinstance(json.loads(complete_members(text)), dict)


def test_numbers_of_any_size_stay_as_they_were_written() -> None:
    assert complete_members('{"a": 1e999, "b": ' + "7" * 1000) == '{"a": 1e999, "b": ' + "7" * 1000 + "}"


def test_nesting_without_end_is_closed() -> None:
    assert complete_members('{"a":' + "[" * 100_000) == '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
