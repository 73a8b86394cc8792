"""Cases of the HTTP APIs with known answers: reading them, and what judging them has in common.

A case file has one JSON object per line: ``kind`` tells the API, ``request`` is a body, ``expected`` the right outcome.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbus_protocols.conversation import (
    Conversation,
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)

Case = dict[str, Any]


def read_cases(file: Path, kind: str) -> list[Case]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [case for line in lines if (case := json.loads(line))["kind"] == kind]


def by_id(cases: Sequence[Case]) -> dict[str, Any]:
    """Arguments of ``pytest.mark.parametrize``."""
    return {"argvalues": cases, "ids": [case["id"] for case in cases]}


def parsers_of(case: Case) -> dict[str, str]:
    """Fields of the model card."""
    return {
        "tool_call_parser": case["parser"]["tool"] or "none",
        "reasoning_parser": case["parser"]["reasoning"] or "none",
    }


def chat_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """A conversation as the cases write it: Chat messages with the thoughts in ``reasoning``, arguments parsed."""
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        results = [part for part in turn.parts if isinstance(part, ToolResultPart)]
        if results:
            messages += [
                {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.parts)}
                for result in results
            ]
            continue
        message: dict[str, Any] = {"role": turn.role, "content": _content(turn.parts)}
        if reasoning := "".join(part.text for part in turn.parts if isinstance(part, ReasoningPart)):
            message["reasoning"] = reasoning
        calls = [part for part in turn.parts if isinstance(part, ToolCallPart)]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)} for call in calls
            ]
        messages.append(message)
    return messages


def _content(parts: Sequence[Part]) -> Any:
    if not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, TextPart)) or None
    return [
        {"type": "image_url", "image_url": {"url": part.url}}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
        if isinstance(part, TextPart | ImagePart)
    ]


def holds(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether all that is wanted is there, whatever else is."""
    return all(key in found and found[key] == value for key, value in wanted.items())


def matches(message: dict[str, Any], expected: dict[str, Any]) -> bool:
    """`holds`, where words may be asked for instead of the whole content."""
    words = expected.get("content_contains", expected.get("contains", []))
    plain = {key: value for key, value in expected.items() if key not in ("content_contains", "contains")}
    return all(word in message["content"] for word in words) and holds(message, plain)


def check_steps(lines: Sequence[str], pattern: Sequence[str]) -> None:
    """The lines are the steps of the pattern, in which a trailing + means one or more."""
    left = list(lines)
    for step in pattern:
        name = step.removesuffix("+")
        assert left, f"{step} is missing"
        assert left.pop(0) == name
        while step.endswith("+") and left and left[0] == name:
            left.pop(0)
    assert left == []
