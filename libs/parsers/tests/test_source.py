"""The primitives of a source: what they read and leave must not depend on how the input is cut."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.source import Source, Step, markers

Grammar = Callable[[Source], Step[Any]]


def _read(grammar: Grammar, chunks: Sequence[str], *, cut: bool = False) -> tuple[Any, str]:
    """What the grammar returns, and what it leaves unread."""
    source = Source()

    def then_the_rest() -> Step[tuple[Any, str]]:
        value = yield from grammar(source)
        rest: list[str] = []
        yield from source.until(markers(), rest.append)
        return value, "".join(rest)

    steps = then_the_rest()
    next(steps)
    for chunk in chunks:
        source.feed(chunk)
        next(steps)
    source.finish(cut=cut)
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    value: tuple[Any, str] = stopped.value.value
    return value


def _read_any_way(grammar: Grammar, text: str, *, cut: bool = False) -> tuple[Any, str]:
    """`_read`, the same for every size of pieces."""
    whole = _read(grammar, [text], cut=cut)
    for size in range(1, len(text)):
        assert _read(grammar, [text[at : at + size] for at in range(0, len(text), size)], cut=cut) == whole
    return whole


def _until(*texts: str) -> Grammar:
    def grammar(source: Source) -> Step[tuple[str, str | None]]:
        passed: list[str] = []
        marker = yield from source.until(markers(*texts), passed.append)
        return "".join(passed), marker

    return grammar


@pytest.mark.parametrize(
    ("text", "passed", "marker", "rest"),
    [
        ("a<b>c", "a", "<b>", "c"),
        ("a<<b>c", "a<", "<b>", "c"),
        ("a<b", "a<b", None, ""),
        ("a<bb>", "a", "<bb>", ""),
        ("a<b><bb>", "a", "<b>", "<bb>"),
        ("", "", None, ""),
    ],
)
def test_until_passes_text_on_up_to_the_first_marker(text: str, passed: str, marker: str | None, rest: str) -> None:
    assert _read_any_way(_until("<b>", "<bb>"), text) == ((passed, marker), rest)


def test_of_markers_that_begin_at_one_place_the_longest_is_read() -> None:
    assert _read_any_way(_until("Here", "Here is"), "x Here is y") == (("x ", "Here is"), " y")
    assert _read_any_way(_until("Here", "Here is"), "x Here it is") == (("x ", "Here"), " it is")
    assert _read_any_way(_until("Here", "Here is"), "x Here i") == (("x ", "Here"), " i")


def test_only_what_can_become_a_marker_is_held_back() -> None:
    source, passed = Source(), list[str]()
    steps = source.until(markers("</think>"), passed.append)
    next(steps)
    for chunk, expected in (("ab<", "ab"), ("/th", ""), ("ere <", "</there "), ("<", "<"), ("!", "<!")):
        source.feed(chunk)
        next(steps)
        assert "".join(passed) == expected
        passed.clear()


PIECES = st.lists(st.sampled_from(["<", "a", "b", ">", "<a>", "<ab>", "ab", " "]), max_size=12)


@given(PIECES)
def test_until_finds_what_a_search_in_the_whole_text_finds(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = re.search("<ab>|<a>|ab", text)
    expected = ((text[: found.start()], found.group()), text[found.end() :]) if found else ((text, None), "")
    assert _read(_until("<a>", "<ab>", "ab"), pieces) == expected
    assert _read(_until("<a>", "<ab>", "ab"), list(text)) == expected


def test_take_until_gives_up_beyond_its_limit() -> None:
    def grammar(source: Source) -> Step[tuple[str, str | None]]:
        return (yield from source.take_until(markers("="), limit=4))

    assert _read_any_way(grammar, "name=v") == (("name", "="), "v")
    assert _read_any_way(grammar, "names=v") == (("name", None), "s=v")
    assert _read_any_way(grammar, "nam") == (("nam", None), "")


def test_a_literal_is_read_whole_or_not_at_all() -> None:
    assert _read_any_way(lambda source: source.literal("[ARGS]"), "[ARGS]{}") == (True, "{}")
    assert _read_any_way(lambda source: source.literal("[ARGS]"), "[ARG}") == (False, "[ARG}")
    assert _read_any_way(lambda source: source.literal("[ARGS]"), "[AR") == (False, "[AR")


def test_one_of_reads_the_longest_marker_that_stands_there() -> None:
    choices = markers("<a>", "<a><b>")
    assert _read_any_way(lambda source: source.one_of(choices), "<a><b>c") == ("<a><b>", "c")
    assert _read_any_way(lambda source: source.one_of(choices), "<a><c>") == ("<a>", "<c>")
    assert _read_any_way(lambda source: source.one_of(choices), "x<a>") == (None, "x<a>")
    assert _read_any_way(lambda source: source.one_of(choices), "<a") == (None, "<a")


def test_of_no_choices_none_is_waited_for() -> None:
    with pytest.raises(StopIteration) as stopped:
        next(Source().one_of(markers()))
    assert stopped.value.value is None


def test_white_space_is_read_only_in_front_of_what_is_looked_for() -> None:
    assert _read_any_way(lambda source: source.ahead("{["), " \n {}") == (True, "{}")
    assert _read_any_way(lambda source: source.ahead("{["), " \n x") == (False, " \n x")
    assert _read_any_way(lambda source: source.ahead("{["), " \n ") == (False, " \n ")


def test_a_recording_gives_back_what_was_read_in_any_number_of_steps() -> None:
    def grammar(source: Source) -> Step[str]:
        outer = source.record()
        yield from source.take_until(markers("2"))
        inner = source.record()
        yield from source.take_until(markers("4"))
        again = source.recorded(inner)
        source.rewind(inner)
        yield from source.take_until(markers("5"))
        source.unread("45")
        seen = source.recorded(outer)
        source.rewind(outer)
        return f"{again} {seen}"

    assert _read_any_way(grammar, "1234567") == ("34 123", "1234567")


def test_a_dismissed_opener_is_text_unless_the_output_was_cut_behind_it() -> None:
    def grammar(source: Source) -> Step[bool]:
        recording = source.record()
        yield from source.skip_space()
        return source.dismiss(recording)

    assert _read_any_way(grammar, " x", cut=True) == (False, " x")
    assert _read_any_way(grammar, "  ") == (False, "  ")
    assert _read_any_way(grammar, "  ", cut=True) == (True, "")


def test_a_json_value_is_passed_on_and_what_follows_is_left() -> None:
    def grammar(source: Source) -> Step[tuple[str, JsonEnd]]:
        passed: list[str] = []
        ended = yield from source.json_value(passed.append)
        return "".join(passed), ended

    assert _read_any_way(grammar, '{"a": [1, "}"]}}') == (('{"a": [1, "}"]}', JsonEnd.COMPLETE), "}")
    assert _read_any_way(grammar, '{"a": 1') == (('{"a": 1', JsonEnd.CUT), "")
    assert _read_any_way(grammar, '{"a" 1}') == (('{"a" ', JsonEnd.INVALID), "1}")
    assert _read_any_way(grammar, "12") == (("12", JsonEnd.COMPLETE), "")


def test_a_search_with_a_limit_does_not_look_beyond_it() -> None:
    source = Source()
    source.feed("a" * 100_000 + "|")
    step = source.take_until(markers("|"), 10)
    with pytest.raises(StopIteration) as stopped:
        next(step)
    assert stopped.value.value == ("a" * 10, None)
    assert source.scanned < 20
