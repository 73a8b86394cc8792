"""Chat messages in the shape that chat templates expect."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_protocols.chat import ChatMessage, ContentPart, FunctionCall, Tool


def template_messages(messages: Sequence[ChatMessage], *, argument_strings: bool) -> list[dict[str, Any]]:
    """``argument_strings``: the template takes tool-call arguments as the text that the model wrote, too; others need objects."""
    return [_template_message(message, argument_strings) for message in messages]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [{"type": tool.type, "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    function.pop("strict", None)  # a wish to the server, not a part of the function
    return function


def _template_message(message: ChatMessage, argument_strings: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content)}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function, argument_strings)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(content: str | list[ContentPart] | None) -> str:
    """No content is empty content: many templates add it to other text without a look."""
    if isinstance(content, list):
        return "\n".join(part.text or part.refusal or "" for part in content)
    return content or ""


def _arguments(call: FunctionCall, as_string: bool) -> Any:
    arguments = call.arguments or {}
    if as_string or not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments  # what the model wrote is no JSON: the template gets it as it is
