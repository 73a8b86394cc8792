"""Chat Completions requests as conversations."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_protocols.chat import ChatMessage, ChatRequest, ContentPart, ImageUrl, NamedToolChoice, Tool, ToolCall
from kvbus_protocols.conversation import (
    Conversation,
    ImagePart,
    OutputFormat,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    ToolSpec,
    Turn,
)


def chat_conversation(request: ChatRequest) -> Conversation:
    """Of a request that has passed its checks."""
    variables = dict(request.chat_template_kwargs or {})
    reasoning = None
    if request.reasoning_effort is not None:
        reasoning = request.reasoning_effort != "none"
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return Conversation(
        generation=request,
        turns=chat_turns(request.messages),
        tools=chat_tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        output_format=_output_format(request),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final=bool(request.continue_final_message),
        template_variables=variables,
        reasoning=reasoning,
    )


def chat_turns(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    return tuple(map(_turn, messages))


def chat_tools(tools: Sequence[Tool] | None) -> tuple[ToolSpec, ...]:
    return tuple(map(_tool, tools or ()))


def _turn(message: ChatMessage) -> Turn:
    match message.role:
        case "tool" | "function":
            parts = tuple(part for part in _content(message.content) if isinstance(part, TextPart | ImagePart))
            return Turn("tool", (ToolResultPart(message.tool_call_id or "", parts),), message.name)
        case "assistant":
            return Turn("assistant", _assistant_parts(message), message.name)
        case "user":
            return Turn("user", _content(message.content), message.name)
        case _:
            return Turn("system", _content(message.content), message.name)


def _assistant_parts(message: ChatMessage) -> tuple[Part, ...]:
    """This API has no order between the three: thoughts come first and calls last, as models write them."""
    reasoning = message.reasoning_content or message.reasoning
    return (
        *([ReasoningPart(reasoning)] if reasoning else []),
        *_content(message.content),
        *map(_call, message.tool_calls or ()),
    )


def _content(content: str | list[ContentPart] | None) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(map(_part, content or ()))


def _part(part: ContentPart) -> Part:
    if part.image_url is not None:
        return ImagePart(part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url)
    return TextPart(part.text or part.refusal or "")


def _call(call: ToolCall) -> ToolCallPart:
    if call.custom is not None:
        return ToolCallPart(call.id or "", call.custom.name, call.custom.input, custom=True)
    if call.function is None:
        return ToolCallPart(call.id or "", "")
    arguments = call.function.arguments or ""
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCallPart(call.id or "", call.function.name, arguments)


def _tool(tool: Tool) -> ToolSpec:
    if tool.custom is not None:
        form = tool.custom.format
        return ToolSpec(
            name=tool.custom.name,
            description=tool.custom.description,
            custom=True,
            grammar=form.grammar if form is not None else None,
        )
    function = tool.function
    if function is None:
        return ToolSpec(name="")
    return ToolSpec(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
    )


def _tool_choice(choice: str | NamedToolChoice | None) -> ToolChoice:
    if isinstance(choice, NamedToolChoice):
        if choice.allowed_tools is not None:
            required = choice.allowed_tools.mode == "required"
            return ToolChoice("required" if required else "auto", tuple(choice.names))
        return ToolChoice("required", tuple(choice.names), named=True)
    match choice:
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case _:
            return ToolChoice()


def _output_format(request: ChatRequest) -> OutputFormat | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(kind="json_object")
    given: dict[str, Any] = wanted.json_schema or {}
    name = given.get("name")
    return OutputFormat(
        kind="json_schema",
        schema=given["schema"],
        name=name if isinstance(name, str) else None,
        strict=given.get("strict") is True,
    )
