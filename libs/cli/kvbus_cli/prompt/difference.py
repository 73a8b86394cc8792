"""Where the prompts of two requests part. Pure."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, zip_longest

import msgspec

from kvbus_protocols.prompt_view import PromptSegment, PromptView

CONTEXT_CHARS = 48


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two prompts at the place where they part.

    ``source``: the field that the text there comes from, None for template text and at the end; ``at``: how many characters of the
    field come before, None where that is not known. ``after``, ``before``: the nearest fields around it. ``text``: how it goes on.
    """

    tokens: int
    blocks: int
    share: float
    block_share: float
    source: str | None
    at: int | None
    after: str | None
    before: str | None
    text: str
    is_end: bool

    @property
    def place(self) -> str:
        if self.source is not None:
            return self.source if self.at is None else f"{self.source} at char {self.at:,}"
        if self.is_end:
            return f"the end, after {self.after}" if self.after is not None else "the end"
        around = [f"{word} {field}" for word, field in (("after", self.after), ("before", self.before)) if field]
        return " ".join(["template text", ", ".join(around)]).strip()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``char``, ``line``: where in both prompts they part, from 0 and from 1; ``common``: the text before that."""

    common_tokens: int
    common_blocks: int
    char: int
    line: int
    common: str
    a: Side
    b: Side

    @property
    def is_none(self) -> bool:
        return self.a.is_end and self.b.is_end and self.common_tokens == self.a.tokens == self.b.tokens


class PromptText:
    """The text of a prompt, and what stands where in it."""

    def __init__(self, segments: Sequence[PromptSegment]) -> None:
        self.segments = segments
        self.text = "".join(segment.text for segment in segments)
        self.starts = list(accumulate((len(segment.text) for segment in segments), initial=0))
        self.special = [
            (start, segment.text) for start, segment in zip(self.starts, segments, strict=False) if segment.special
        ]

    def index(self, char: int) -> int:
        """Of the segment with this character; the number of segments at the end."""
        return bisect_right(self.starts, char) - 1

    def line(self, char: int) -> str:
        """The line with this character, of which it may be the end. Control tokens end lines, too."""
        ends = [(start, start + len(text)) for start, text in self.special]
        first = max([self.text.rfind("\n", 0, char) + 1, *(end for _, end in ends if end <= char)])
        last = self.text.find("\n", char)
        return self.text[
            first : min([len(self.text) if last < 0 else last, *(start for start, _ in ends if start >= char)])
        ]


def difference(a: PromptView, b: PromptView) -> Difference:
    first, second = PromptText(a.segments), PromptText(b.segments)
    char = _parting(first, second)
    tokens = _common(a.tokens, b.tokens)
    blocks = _common([block.key for block in a.blocks], [block.key for block in b.blocks])
    return Difference(
        common_tokens=tokens,
        common_blocks=blocks,
        char=char,
        line=first.text.count("\n", 0, char) + 1,
        common=first.text[max(char - CONTEXT_CHARS, 0) : char],
        a=_side(a, first, char, tokens, blocks),
        b=_side(b, second, char, tokens, blocks),
    )


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _parting(a: PromptText, b: PromptText) -> int:
    """The first character that is another one, or belongs to another control token or to one in one prompt only."""
    char = _common(a.text, b.text)
    for one, other in zip_longest(a.special, b.special):
        if one != other:
            return min(char, *(token[0] for token in (one, other) if token is not None))
        if one is None or one[0] >= char:
            break
    return char


def _side(view: PromptView, prompt: PromptText, char: int, tokens: int, blocks: int) -> Side:
    at = prompt.index(char)
    segments = prompt.segments
    is_end = char >= len(prompt.text)
    segment = None if is_end else segments[at]
    return Side(
        tokens=view.count,
        blocks=len(view.blocks),
        share=_share(tokens, view.count),
        block_share=_share(blocks, len(view.blocks)),
        source=segment.source if segment is not None else None,
        at=_field_char(segment, char - prompt.starts[at]) if segment is not None else None,
        after=next((found.source for found in reversed(segments[:at]) if found.source is not None), None),
        before=next((found.source for found in segments[at:] if found.source is not None), None),
        text=prompt.text[char : char + CONTEXT_CHARS],
        is_end=is_end,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _field_char(segment: PromptSegment, chars: int) -> int | None:
    """``chars``: of the segment, before the place."""
    if segment.offset is None or not segment.escaped:
        return None if segment.offset is None else segment.offset + chars
    for end in range(chars, -1, -1):  # the place may be in the middle of an escape
        try:
            return segment.offset + len(json.loads(f'"{segment.text[:end]}"'))
        except ValueError:
            continue
    return None
