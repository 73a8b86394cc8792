"""Which turns go when a conversation is too long."""

import pytest

from kvbus_frontend.core.truncation import Droppable, prompt_room
from kvbus_protocols.conversation import (
    CacheBreakpoint,
    Conversation,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from kvbus_protocols.generation import GenerationRequest


def turn(name: str) -> Turn:
    """By its first letter: system, user, assistant, call (of the assistant), result."""
    match name[0]:
        case "s":
            return Turn("system", (TextPart(name),))
        case "u":
            return Turn("user", (TextPart(name),))
        case "c":
            return Turn("assistant", (ToolCallPart(name, "f"),))
        case "r":
            return Turn("tool", (ToolResultPart(name, (TextPart(name),)),))
        case _:
            return Turn("assistant", (TextPart(name),))


def conversation(names: str) -> Conversation:
    return Conversation(
        generation=GenerationRequest(model="m"),
        turns=tuple(map(turn, names.split())),
        breakpoints=(CacheBreakpoint(0),),
    )


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("s1 u1 a1 u2 a2 u3", ["s1 a1 u2 a2 u3", "s1 u2 a2 u3", "s1 a2 u3", "s1 u3"]),
        ("u1 c1 r1 c2 r2 c3 r3", ["u1 c2 r2 c3 r3", "u1 c3 r3"]),
        ("s1 s2 u1 s3 u2", ["s1 s2 s3 u2", "s1 s2 u2"]),
        ("u1", []),
        ("s1", []),
        ("a1 u1 a2", ["u1 a2"]),
        ("r1 u1", ["u1"]),
    ],
)
def test_the_oldest_units_go_and_results_go_with_their_calls(names: str, left: list[str]) -> None:
    droppable = Droppable(conversation(names))
    assert droppable.most == len(left)
    found = [droppable.without(count) for count in range(1, droppable.most + 1)]
    assert [one.turns for one in found] == [tuple(map(turn, text.split())) for text in left]
    assert all(one.breakpoints == () for one in found)
    assert droppable.without(0) == conversation(names)


@pytest.mark.parametrize(("limit", "room"), [(None, 750), (100, 900), (10_000, 500)])
def test_room_is_left_for_the_answer(limit: int | None, room: int) -> None:
    assert prompt_room(1000, limit) == room
