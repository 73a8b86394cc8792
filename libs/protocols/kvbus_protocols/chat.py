"""``POST /v1/chat/completions``: request, response and stream chunks."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.generation import GenerationRequest, OptionalUsage, Usage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments``: JSON text, as the model wrote it; an object is accepted too."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
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


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: str
    function: NamedFunction | None = None


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def token_limit_param(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

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
        if part.type in TEXT_PARTS and part.text is None:
            raise InvalidRequest(f"Missing '{where}.content[{i}].text'.", param=f"{where}.content[{i}].text")
        if part.type not in (*TEXT_PARTS, "refusal"):
            raise InvalidRequest(
                f"Content parts of the type '{part.type}' are not supported.",
                param=f"{where}.content[{i}].type",
                code="unsupported_content",
            )


def _check_tools(tools: list[Tool], choice: str | NamedToolChoice | None) -> None:
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest(f"Tools of the type '{tool.type}' are not supported.", param=f"tools[{i}]")
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, str) and choice != "required":
        raise InvalidRequest("'tool_choice' must be none, auto, required or a function.", param="tool_choice")
    if not tools:
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name if choice.function is not None else None
        if name is not None and all(tool.function is None or tool.function.name != name for tool in tools):
            raise InvalidRequest(f"The function '{name}' of 'tool_choice' is not in 'tools'.", param="tool_choice")


def _check_response_format(wanted: ResponseFormat | None) -> None:
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_schema" and not (wanted.json_schema or {}).get("schema"):
        raise InvalidRequest("'response_format' of the type json_schema needs a schema.", param="response_format")
    if wanted.type in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"'response_format' of the type {wanted.type} is not supported.",
            param="response_format",
            code="unsupported",
        )
    raise InvalidRequest("'response_format' must be text, json_object or json_schema.", param="response_format")


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


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
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


class ChatDelta(msgspec.Struct, frozen=True):
    """``role`` comes once, in the first delta of a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
