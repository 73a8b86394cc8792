"""How long parts of a prompt are worth keeping: what the client says, in tokens."""

from collections.abc import Iterable, Sequence

from kvbus_protocols.conversation import CacheBreakpoint, TextPart, ToolResultPart, Turn
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import Segment
from kvbus_wire.request import Retention

DEFAULT_TTL_S = 300.0
"""Of a cache breakpoint that names none, as in the Messages API."""


def retention_of(
    request: GenerationRequest, breakpoints: Sequence[CacheBreakpoint], ends: Sequence[int]
) -> tuple[Retention, ...]:
    """``ends``: per breakpoint the number of prompt tokens it covers; those that cover none say nothing."""
    given = request.kvbus.retention or () if request.kvbus is not None else ()
    return (
        *(
            Retention(
                start=kept.start_token or 0,
                end=kept.end_token or 0,
                priority=kept.priority or 0,
                ttl_s=kept.ttl_s,
                kind=kept.kind,
            )
            for kept in given
        ),
        *(
            Retention(end=end, ttl_s=DEFAULT_TTL_S if point.ttl_s is None else point.ttl_s, kind="pinned")
            for point, end in zip(breakpoints, ends, strict=True)
            if end
        ),
    )


def covered_segments(
    segments: Sequence[Segment], turns: Sequence[Turn], breakpoints: Iterable[CacheBreakpoint]
) -> list[int]:
    """Per breakpoint, how many leading segments of the rendered prompt hold nothing that comes after it.

    Found by the ends of the turns' texts, in their order: cheaper by far than rendering the conversation once per breakpoint. A
    breakpoint behind the tools covers what the template writes before the first turn. Behind text that the template does not write
    as it is, a breakpoint covers less than it could.
    """
    starts: list[int] = []
    size = 0
    for segment in segments:
        starts.append(size)
        size += len(segment.text)
    whole = "".join(segment.text for segment in segments)
    ends = _turn_ends(whole, turns)
    last = len(ends) - 1  # a turn may have gone since
    return [_segments_before(starts, size, ends[min(point.turn + 1, last)]) for point in breakpoints]


def _turn_ends(whole: str, turns: Sequence[Turn]) -> list[int]:
    """Where the texts of each turn end in the prompt; first of all, where those of the first turn begin."""
    first = _texts(turns[0]) if turns else []
    position = max(whole.find(first[0]), 0) if first else 0
    ends = [position]
    for turn in turns:
        for text in _texts(turn):
            found = whole.find(text, position)
            if found >= 0:
                position = found + len(text)
        ends.append(position)
    return ends


def _texts(turn: Turn) -> list[str]:
    texts: list[str] = []
    for part in turn.parts:
        if isinstance(part, TextPart):
            texts.append(part.text.strip())
        elif isinstance(part, ToolResultPart):
            texts += [inner.text.strip() for inner in part.parts if isinstance(inner, TextPart)]
    return [text for text in texts if text]


def _segments_before(starts: Sequence[int], size: int, position: int) -> int:
    """How many segments end at or before the character ``position``."""
    ends = [*starts[1:], size]
    return sum(end <= position for end in ends)
