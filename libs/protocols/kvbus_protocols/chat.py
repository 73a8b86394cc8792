"""``POST /v1/chat/completions``: request, response and stream chunks."""

from collections.abc import Container
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbus_protocols.conversation import Grammar
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import GenerationRequest, OptionalUsage, Usage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


class ImageUrl(msgspec.Struct, frozen=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments``: JSON text, as the model wrote it; an object is accepted too."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool: its input is free text."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(msgspec.Struct, frozen=True):
    """``type``: text or grammar."""

    type: str
    grammar: Grammar | None = None


class CustomTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: Function | None = None
    custom: CustomTool | None = None

    @property
    def name(self) -> str | None:
        named = self.function or self.custom
        return named.name if named is not None else None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    mode: str
    tools: list[Tool]


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def names(self) -> list[str]:
        """The tools that may be called."""
        if self.allowed_tools is not None:
            return [name for tool in self.allowed_tools.tools if (name := tool.name) is not None]
        named = self.function or self.custom
        return [named.name] if named is not None else []


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise InvalidRequest for what the types alone cannot say."""
        self.check_generation()
        for i, message in enumerate(self.messages):
            _check_message(message, f"messages[{i}]")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        _check_tools(self.tools or [], self.tool_choice)
        _check_response_format(self.response_format)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"Invalid value for '{where}.role': '{message.role}'. Supported values are: {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    if not isinstance(message.content, list):
        return
    for i, part in enumerate(message.content):
        place = f"{where}.content[{i}]"
        if part.type in TEXT_PARTS and part.text is None:
            raise InvalidRequest(f"Missing '{place}.text'.", param=f"{place}.text")
        if part.type == "image_url" and part.image_url is None:
            raise InvalidRequest(f"Missing '{place}.image_url'.", param=f"{place}.image_url")
        if part.type not in (*TEXT_PARTS, "refusal", "image_url"):
            raise InvalidRequest(
                f"Content parts of the type '{part.type}' are not supported.",
                param=f"{place}.type",
                code="unsupported_content",
            )


def _check_tools(tools: list[Tool], choice: str | NamedToolChoice | None) -> None:
    for i, tool in enumerate(tools):
        if tool.type not in ("function", "custom") or tool.name is None:
            raise InvalidRequest(f"Tools of the type '{tool.type}' are not supported.", param=f"tools[{i}]")
        if not tool.name:
            raise InvalidRequest(f"The tool in 'tools[{i}]' has no name.", param=f"tools[{i}].{tool.type}.name")
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, str) and choice != "required":
        raise InvalidRequest("'tool_choice' must be none, auto, required or a function.", param="tool_choice")
    if not tools:
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
    if isinstance(choice, NamedToolChoice):
        _check_named(choice, {tool.name for tool in tools})


def _check_named(choice: NamedToolChoice, known: Container[str | None]) -> None:
    if choice.type not in ("function", "custom", "allowed_tools"):
        raise InvalidRequest(f"'tool_choice' of the type '{choice.type}' is not supported.", param="tool_choice.type")
    if not choice.names:
        raise InvalidRequest("'tool_choice' names no tool.", param="tool_choice")
    for name in choice.names:
        if name not in known:
            raise InvalidRequest(f"The tool '{name}' of 'tool_choice' is not in 'tools'.", param="tool_choice")
    if choice.allowed_tools is not None and choice.allowed_tools.mode not in ("auto", "required"):
        raise InvalidRequest("'mode' must be auto or required.", param="tool_choice.allowed_tools.mode")


def _check_response_format(wanted: ResponseFormat | None) -> None:
    if wanted is None or wanted.type in ("text", "json_object"):
        return
    if wanted.type != "json_schema":
        raise InvalidRequest("'response_format' must be text, json_object or json_schema.", param="response_format")
    if not isinstance((wanted.json_schema or {}).get("schema"), dict):
        raise InvalidRequest(
            "'response_format' of the type json_schema needs a schema.", param="response_format.json_schema.schema"
        )


class TopLogprob(msgspec.Struct, frozen=True):
    """``bytes``: the token's UTF-8 bytes, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class WrittenCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function of a tool call in an answer, or a piece of it: ``arguments`` is JSON text."""

    arguments: str
    name: str | UnsetType = UNSET


class WrittenInput(msgspec.Struct, frozen=True, omit_defaults=True):
    input: str
    name: str | UnsetType = UNSET


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call of an answer. In streams ``index`` tells the calls apart; id, type and name come once, with the first piece."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: WrittenCall | UnsetType = UNSET
    custom: WrittenInput | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    nvext: NvExtAnswer | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """``role`` comes once, in the first delta of a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ToolCallDispatch(msgspec.Struct, frozen=True):
    """Data of ``event: tool_call_dispatch``: a call that is complete while its choice goes on. The shape is Dynamo's.

    ``choices``: empty, for clients that take every event for a chunk, whatever its name.
    """

    choice_index: int
    tool_call: AnswerCall
    choices: list[str] | UnsetType = UNSET


class ReasoningDispatch(msgspec.Struct, frozen=True):
    """Data of ``event: reasoning_dispatch``: a reasoning segment that is complete. The shape is Dynamo's; ``choices``: as above."""

    index: int
    reasoning_content: str
    choices: list[str] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """``usage``: absent unless the request asked for it; then null but in the last chunk, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: OptionalUsage = UNSET
    system_fingerprint: str | None = None
    nvext: NvExtAnswer | UnsetType = UNSET
