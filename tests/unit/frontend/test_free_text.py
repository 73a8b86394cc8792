"""The input of a custom tool out of the JSON it travels in."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.free_text import FreeText


def fed(pieces: list[str]) -> tuple[str, str]:
    """What came out piece by piece, and all of it."""
    text = FreeText()
    given_out = [text.feed(piece) for piece in pieces]
    given_out.append(text.finish("".join(pieces)))
    return "".join(given_out), text.text


@given(st.text(), st.booleans(), st.lists(st.integers(0, 400)))
def test_any_cut_gives_the_text(text: str, ascii_only: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = sorted({0, len(arguments), *(min(cut, len(arguments)) for cut in cuts)})
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert fed([arguments[a:b] for a, b in pairwise(places)]) == (expected, expected)


def test_text_comes_while_it_is_being_written() -> None:
    text = FreeText()
    assert [text.feed(piece) for piece in ('{"in', 'put": "', "*** Be", "gin\\", 'n\\ud83d"'[:-1], '\\ude00 ok"', "}")] == [
        "", "", "*** Be", "gin", "\n", "😀 ok", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"a": 1, "input": "y"}', "y"),
        ('"just text"', "just text"),
        ("echo hello", "echo hello"),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ("", ""),
        ("x" * 1000, "x" * 1000),
    ],
)
def test_other_forms_come_out_whole_at_the_end(arguments: str, text: str) -> None:
    assert fed(list(arguments)) == (text, text)


def test_what_has_come_out_is_never_taken_back() -> None:
    assert fed(['{"input": "a', '", "input": "b"}']) == ("a", "a")


def test_a_cut_call_keeps_what_has_come() -> None:
    text = FreeText()
    text.feed('{"input": "half a pat')
    assert text.text == "half a pat"
