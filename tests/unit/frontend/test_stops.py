"""Stop strings: found however the text is cut, never shown in part."""

import pytest

from kvbus_frontend.core.stops import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    return shown, matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        ([], "abc", "abc", None),
        (["x"], "abc", "abc", None),
        (["b"], "abc", "a", "b"),
        (["abc"], "abc", "", "abc"),
        (["cd"], "abc", "abc", None),
        (["END"], "the EEND", "the E", "END"),
        (["aab"], "aaab", "a", "aab"),
        (["abc", "b"], "abc", "a", "b"),
        (["ab", "abc"], "abc", "", "ab"),
        (["bc", "abc"], "abc", "", "abc"),
        (["\n\n"], "a\n\nb\n\n", "a", "\n\n"),
        (["é"], "caféx", "caf", "é"),
    ],
)
def test_the_first_complete_stop_string_ends_the_text_however_it_is_cut(
    stops: list[str], text: str, shown: str, matched: str | None
) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert feed(stops, pieces) == (shown, matched)


def test_what_may_become_a_stop_string_is_held_back_only_as_long_as_needed() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("a<en") == "a"
    assert matcher.push("try") == "<entry"
    assert matcher.push("<") == ""
    assert matcher.finish() == "<"


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""
