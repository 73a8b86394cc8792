"""JSON that was cut off."""

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.partial_json import parsed_part

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


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
        ('{"a": "line\nbreak"}', {}),
    ],
)
def test_only_what_is_complete_comes_out(text: str, part: dict[str, Any]) -> None:
    assert parsed_part(text) == part


@given(OBJECTS, st.data())
def test_a_cut_object_is_read_as_the_official_client_reads_it(whole: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(whole, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(1, len(text)))]
    try:
        expected = jiter.from_json(cut.encode(), partial_mode=True)
    except (ValueError, UnicodeEncodeError):  # that client has no half surrogate pairs
        return
    assert parsed_part(cut) == expected


@given(OBJECTS)
def test_a_whole_object_comes_out_whole(whole: dict[str, Any]) -> None:
    assert parsed_part(json.dumps(whole)) == whole


@given(st.text(alphabet='{}[]:,"\\ tru1-e.a\n', max_size=30))
def test_no_text_makes_it_fail(text: str) -> None:
    assert isinstance(parsed_part(text), dict)


def test_nesting_without_end_gives_what_was_read() -> None:
    assert "a" in parsed_part('{"a":' + "[" * 100_000)
