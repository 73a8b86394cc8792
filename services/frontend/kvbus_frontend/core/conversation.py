"""Turns and tools in the shape that chat templates expect."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_protocols.conversation import (
    CUSTOM_INPUT,
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    Turn,
)


def template_messages(turns: Sequence[Turn], *, argument_strings: bool) -> list[dict[str, Any]]:
    """``argument_strings``: the template takes tool-call arguments as the text that the model wrote, too; others need objects."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "tool":
            messages += [_result(part, turn.name) for part in turn.parts if isinstance(part, ToolResultPart)]
        else:
            messages.append(_message(turn, argument_strings))
    return messages


def template_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    """Of the top of the prompt, so without those that the conversation itself shows."""
    return [{"type": "function", "function": _function(tool)} for tool in tools if not tool.deferred] or None


def _function(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.argument_schema is not None:
        function["parameters"] = tool.argument_schema
    return function


def _message(turn: Turn, argument_strings: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": turn.role, "content": _text(turn.parts)}
    reasoning = "".join(part.text for part in turn.parts if isinstance(part, ReasoningPart))
    if reasoning:
        plain["reasoning_content"] = reasoning
    calls = [part for part in turn.parts if isinstance(part, ToolCallPart)]
    if calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, argument_strings)},
            }
            for call in calls
        ]
    if turn.name is not None:
        plain["name"] = turn.name
    return plain


def _result(part: ToolResultPart, name: str | None) -> dict[str, Any]:
    plain = {"role": "tool", "tool_call_id": part.call_id, "content": _text(part.parts)}
    return plain if name is None else {**plain, "name": name}


def _text(parts: Sequence[Part]) -> str:
    """No content is empty content: many templates add it to other text without a look."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    images = ["[image omitted: this model reads text only]" for part in parts if isinstance(part, ImagePart)]
    return "\n".join((*texts, *images))


def _arguments(call: ToolCallPart, as_string: bool) -> Any:
    if call.custom:
        arguments = {CUSTOM_INPUT: call.arguments}
        return msgspec.json.encode(arguments).decode() if as_string else arguments
    if as_string:
        return call.arguments or {}
    try:
        return msgspec.json.decode(call.arguments) if call.arguments else {}
    except msgspec.DecodeError:
        return call.arguments  # what the model wrote is no JSON: the template gets it as it is
