"""The end of a JSON value, against what Python's own JSON reader says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_parsers.json_scan import MAX_DEPTH, JsonEnd, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def _scan(text: str, size: int) -> tuple[str, JsonEnd, str]:
    """What was passed on, how the value ended, and what was left, with the text fed in pieces of this size."""
    scanner, passed, held, left = JsonScanner(), list[str](), "", ""
    for at in range(0, len(text), size):
        held += text[at : at + size]
        held = held[scanner.scan(held, 0, passed.append) :]
        if scanner.end:
            left = held + text[at + size :]
            break
    return "".join(passed), scanner.end or scanner.finish(passed.append), left


@given(VALUES, st.booleans(), st.integers(1, 7))
def test_a_value_ends_where_it_ends(value: Any, ascii_only: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=size % 3 or None)
    assert _scan(text + "</tool_call>", size) == (text, JsonEnd.COMPLETE, "</tool_call>")


@given(st.text(alphabet='{}[]",:\\ 01-.eEtrufalsn', max_size=14), st.integers(1, 4))
def test_a_value_is_taken_for_valid_exactly_when_it_is(text: str, size: int) -> None:
    passed, ended, left = _scan(text, size)
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except ValueError:
        assert ended is not JsonEnd.COMPLETE
    else:
        bare = text[0] in "-0123456789tfn"  # a scalar needs a terminator, so it is read up to one
        assert (ended, passed, left) == (JsonEnd.COMPLETE, text[:end], text[end:]) or bare


@pytest.mark.parametrize("text", ["01", "1.", "-", "tru", "truee", "1e", ".5", "+1", "NaN", "None", "0x1"])
def test_numbers_and_words_are_whole_and_json(text: str) -> None:
    for size in (1, 2, 9):
        assert _scan(f"[{text}]", size)[1] is JsonEnd.INVALID


@pytest.mark.parametrize(
    "text", ['"\\x"', '"\\u12g4"', "{1:2}", '{"a":1,}', "[1,]", "[,1]", '{"a"}', "['a']", "{]", "[}"]
)
def test_what_is_no_json_is_invalid(text: str) -> None:
    for size in (1, 2, 9):
        assert _scan(text, size)[1] is JsonEnd.INVALID


def test_raw_control_characters_in_a_string_come_out_escaped() -> None:
    passed, ended, _ = _scan('{"a": "1\n2\t3\x01"}', 1)
    assert ended is JsonEnd.COMPLETE
    assert json.loads(passed) == {"a": "1\n2\t3\x01"}


def test_an_escape_is_passed_on_whole() -> None:
    scanner, passed = JsonScanner(), list[str]()
    assert scanner.scan('"a\\u00', 0, passed.append) == 2
    assert "".join(passed) == '"a'


def test_a_value_nested_deeper_than_readers_go_is_invalid() -> None:
    assert _scan("[" * MAX_DEPTH + "]" * MAX_DEPTH, 9)[1] is JsonEnd.COMPLETE
    assert _scan("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 9)[1] is JsonEnd.INVALID
