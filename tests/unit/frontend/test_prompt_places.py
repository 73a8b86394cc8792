"""Where the parts of a conversation end in its prompt."""

import pytest

from kvbus_frontend.core.prompt import TokenCounts
from kvbus_frontend.core.prompt_places import Places, PromptText
from kvbus_protocols.conversation import CacheBreakpoint, TextPart, ToolResultPart, ToolSpec, Turn
from kvbus_tokenizers import PromptCache, Segment, byte_level_bundle, load_tokenizer, step_ends

TURNS = (
    Turn("system", (TextPart("Be brief."),)),
    Turn("user", (TextPart("One?"), TextPart("Or two?"))),
    Turn("tool", (ToolResultPart("c", (TextPart("One?"),)),)),
)
SEGMENTS = [
    Segment("<s>", 1),
    Segment("tools: look"),
    Segment("<e>", 2),
    Segment("system: Be brief."),
    Segment("<e>", 2),
    Segment("user: One?\nOr two?"),
    Segment("<e>", 2),
    Segment("tool: One?"),
    Segment("<e>", 2),
]
TOOLS = (ToolSpec(name="look"),)


def covered(
    point: CacheBreakpoint,
    turns: tuple[Turn, ...] = TURNS,
    segments: list[Segment] = SEGMENTS,
    tools: tuple[ToolSpec, ...] = TOOLS,
) -> str:
    text = PromptText(segments)
    return text.text[: Places(text, turns, tools, last_turn=point.turn).of(point)]


@pytest.mark.parametrize(
    ("point", "ends"),
    [
        (CacheBreakpoint(-1), "tools: look<e>"),
        (CacheBreakpoint(0), "Be brief."),
        (CacheBreakpoint(1), "Or two?"),
        (CacheBreakpoint(1, None, 1), "user: One?"),
        (CacheBreakpoint(2), "tool: One?"),
    ],
)
def test_a_breakpoint_covers_the_prompt_up_to_its_part(point: CacheBreakpoint, ends: str) -> None:
    assert covered(point).endswith(ends)


def test_text_that_ends_in_white_space_is_covered_with_it() -> None:
    turns = (Turn("user", (TextPart("One? \n "),)),)
    segments = [Segment("<s>", 1), Segment("user\nOne? \n "), Segment("<e>", 2)]
    assert covered(CacheBreakpoint(0), turns, segments) == "<s>user\nOne? \n "
    trimmed = [Segment("<s>", 1), Segment("user\nOne?"), Segment("<e>", 2)]
    assert covered(CacheBreakpoint(0), turns, trimmed) == "<s>user\nOne?"


def test_tools_behind_the_system_text_belong_to_what_comes_before_every_turn() -> None:
    segments = [Segment("<s>", 1), Segment("system\nBe brief.\ntools: look within"), Segment("<e>", 2), Segment("\n")]
    segments += [Segment("<s>", 1), Segment("user\nhi"), Segment("<e>", 2)]
    turns = (Turn("system", (TextPart("Be brief."),)), Turn("user", (TextPart("hi"),)))
    for point in (CacheBreakpoint(-1), CacheBreakpoint(0)):
        assert covered(point, turns, segments).endswith("look within<e>\n<s>")
    assert covered(CacheBreakpoint(1), turns, segments).endswith("user\nhi")


def test_a_short_text_is_not_found_within_the_words_of_the_template() -> None:
    segments = [
        Segment("<s>", 1),
        Segment("system\nthis is it"),
        Segment("<e>", 2),
        Segment("<s>", 1),
        Segment("user\nhi"),
    ]
    assert covered(CacheBreakpoint(0), (Turn("user", (TextPart("hi"),)),), segments, ()).endswith("user\nhi")


def test_text_that_the_template_leaves_out_moves_nothing() -> None:
    turns = (Turn("user", (TextPart("not there"),)), *TURNS[1:])
    assert covered(CacheBreakpoint(0), turns) == ""
    assert covered(CacheBreakpoint(1), turns).endswith("Or two?")


def test_a_conversation_without_turns_has_nothing_to_keep() -> None:
    assert covered(CacheBreakpoint(-1), ()) == ""


def test_a_breakpoint_in_a_turn_that_has_gone_covers_what_is_left() -> None:
    assert covered(CacheBreakpoint(2), TURNS[:2]).endswith("Or two?")


def test_the_head_ends_before_the_first_turn() -> None:
    text = PromptText(SEGMENTS)
    assert text.text[: Places(text, TURNS, TOOLS, last_turn=-1).head].endswith("Be brief.<e>")


def test_tokens_are_counted_up_to_a_place_within_a_segment() -> None:
    tokenizer, cache = load_tokenizer(byte_level_bundle()), PromptCache(1 << 20)
    segments = [Segment("system: Be brief. "), Segment("user: What?")]
    encoded = cache.encode(tokenizer, segments)
    counts = TokenCounts(PromptText(segments), segments, encoded, tokenizer, cache)
    assert [counts.before(place) for place in (0, 7, 18, 20, 29, 99)] == [0, 7, 18, 20, 29, 29]


def test_tokens_before_every_place_of_a_long_prompt_are_those_of_the_text_before_it() -> None:
    """The byte-level vocabulary has a token per byte, so that is what must be counted, in characters of any size."""
    tokenizer, cache = load_tokenizer(byte_level_bundle()), PromptCache(1 << 20)
    segments: list[Segment] = []
    for i in range(12):
        segments += [
            Segment("<s>", 256),
            Segment(f"user\nn\u00f6 {i} " + "x" * 30 * i),
            Segment("<e>", 257),
            Segment("\n"),
        ]
    text, encoded = PromptText(segments), cache.encode(tokenizer, segments)
    counts = TokenCounts(text, segments, encoded, tokenizer, cache)
    sizes = [1 if segment.token_id is not None else len(segment.text.encode()) for segment in segments]
    for i, start in enumerate(text.starts):
        assert counts.before(start) == sum(sizes[:i])
    assert counts.before(len(text.text)) == encoded.count == sum(sizes)
    assert counts.before(text.starts[1] + 6) == 1 + 6
    assert step_ends(segments)[-1] == len(segments)
    assert len(step_ends(segments)) == len(encoded.ends)
