"""Cache breakpoints and retention ranges become token ranges of the prompt."""

import pytest

from kvbus_frontend.core.retention import covered_segments, retention_of
from kvbus_protocols.conversation import CacheBreakpoint, TextPart, ToolResultPart, Turn
from kvbus_protocols.extensions import KvbusExt
from kvbus_protocols.extensions import Retention as Asked
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import Segment
from kvbus_wire.request import Retention

TURNS = (
    Turn("system", (TextPart("Be brief."),)),
    Turn("user", (TextPart("One?"),)),
    Turn("tool", (ToolResultPart("c", (TextPart("One?"),)),)),
)
SEGMENTS = [
    Segment("<s>", 1),
    Segment("system: tools"),
    Segment("<e>", 2),
    Segment("system: Be brief."),
    Segment("<e>", 2),
    Segment("user: One?"),
    Segment("<e>", 2),
    Segment("tool: One?"),
    Segment("<e>", 2),
]


@pytest.mark.parametrize(("turn", "covered"), [(-1, 3), (0, 4), (1, 6), (2, 8)])
def test_a_breakpoint_covers_the_segments_up_to_the_end_of_its_turn(turn: int, covered: int) -> None:
    assert covered_segments(SEGMENTS, TURNS, [CacheBreakpoint(turn)]) == [covered]


def test_text_that_the_template_leaves_out_moves_nothing() -> None:
    turns = (Turn("user", (TextPart("not there"),)), *TURNS[1:])
    assert covered_segments(SEGMENTS, turns, [CacheBreakpoint(0), CacheBreakpoint(1)]) == [0, 6]


def test_a_conversation_without_turns_has_nothing_to_keep() -> None:
    assert covered_segments(SEGMENTS, (), [CacheBreakpoint(-1)]) == [0]


def test_a_breakpoint_in_a_turn_that_has_gone_covers_what_is_left() -> None:
    assert covered_segments(SEGMENTS, TURNS[:2], [CacheBreakpoint(2)]) == [6]


def test_ranges_and_breakpoints_become_directives() -> None:
    asked = Asked(start_token=16, end_token=32, priority=3, ttl_s=9.0, kind="ephemeral")
    request = GenerationRequest(model="m", kvbus=KvbusExt(retention=[asked, Asked(priority=1)]))
    points = [CacheBreakpoint(0), CacheBreakpoint(1, 3600.0), CacheBreakpoint(2)]
    assert retention_of(request, points, [100, 200, 0]) == (
        Retention(start=16, end=32, priority=3, ttl_s=9.0, kind="ephemeral"),
        Retention(priority=1),
        Retention(end=100, ttl_s=300.0, kind="pinned"),
        Retention(end=200, ttl_s=3600.0, kind="pinned"),
    )
