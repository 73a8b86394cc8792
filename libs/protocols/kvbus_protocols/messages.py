"""``POST /v1/messages`` and ``/v1/messages/count_tokens`` (Anthropic): requests, the answer, and the events of a stream.

Unknown fields are ignored (beta fields come and go), unknown kinds of content are refused.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import GenerationRequest

# Requests


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Param(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A block of a request. ``cache_control``: the prompt up to here is worth keeping."""

    cache_control: CacheControl | None = None


class TextParam(_Param, frozen=True, kw_only=True, tag="text"):
    text: str


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    url: str


class FileSource(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    file_id: str


class PlainTextSource(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    data: str


class ImageParam(_Param, frozen=True, kw_only=True, tag="image"):
    source: Base64Source | UrlSource | FileSource


class ContentSource(msgspec.Struct, frozen=True, tag_field="type", tag="content"):
    content: str | list[TextParam | ImageParam]


class DocumentParam(_Param, frozen=True, kw_only=True, tag="document"):
    source: Base64Source | UrlSource | FileSource | PlainTextSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResultParam(_Param, frozen=True, kw_only=True, tag="search_result"):
    source: str
    title: str
    content: list[TextParam]


class ToolReferenceParam(_Param, frozen=True, kw_only=True, tag="tool_reference"):
    """Stands for the description of a tool that is not shown at the top of the prompt."""

    tool_name: str


class ThinkingParam(_Param, frozen=True, kw_only=True, tag="thinking"):
    thinking: str = ""
    signature: str | None = None


class RedactedThinkingParam(_Param, frozen=True, kw_only=True, tag="redacted_thinking"):
    data: str | None = None


class ToolUseParam(_Param, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultParam(_Param, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextParam | ImageParam | DocumentParam | SearchResultParam | ToolReferenceParam] | None = None
    is_error: bool | None = None


class ServerRunParam(_Param, frozen=True, kw_only=True):
    """What another server has run within its answer, and what came of it. The words that followed from it stand beside it."""


class ServerToolUseParam(ServerRunParam, frozen=True, kw_only=True, tag="server_tool_use"):
    pass


class McpToolUseParam(ServerRunParam, frozen=True, kw_only=True, tag="mcp_tool_use"):
    pass


class McpToolResultParam(ServerRunParam, frozen=True, kw_only=True, tag="mcp_tool_result"):
    pass


class WebSearchResultParam(ServerRunParam, frozen=True, kw_only=True, tag="web_search_tool_result"):
    pass


class WebFetchResultParam(ServerRunParam, frozen=True, kw_only=True, tag="web_fetch_tool_result"):
    pass


class CodeResultParam(ServerRunParam, frozen=True, kw_only=True, tag="code_execution_tool_result"):
    pass


class BashResultParam(ServerRunParam, frozen=True, kw_only=True, tag="bash_code_execution_tool_result"):
    pass


class EditorResultParam(ServerRunParam, frozen=True, kw_only=True, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResultParam(ServerRunParam, frozen=True, kw_only=True, tag="tool_search_tool_result"):
    pass


_ServerRun = (
    ServerToolUseParam
    | McpToolUseParam
    | McpToolResultParam
    | WebSearchResultParam
    | WebFetchResultParam
    | CodeResultParam
    | BashResultParam
    | EditorResultParam
    | ToolSearchResultParam
)

BlockParam = (
    TextParam
    | ImageParam
    | DocumentParam
    | SearchResultParam
    | ThinkingParam
    | RedactedThinkingParam
    | ToolUseParam
    | ToolResultParam
    | _ServerRun
)


class MessageParam(msgspec.Struct, frozen=True):
    """Role ``system``: instructions in the middle of a conversation, which stay where they are."""

    role: Literal["user", "assistant", "system"]
    content: str | list[BlockParam]


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """``type``: absent or custom for a tool of the client; any other is one of the server's. ``defer_loading``: see
    `ToolReferenceParam`."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")


class ToolChoiceParam(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = None


class JsonFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class MessagesRequest(GenerationRequest, frozen=True, kw_only=True):
    """``output_format``: the older place of ``output_config.format``. ``chat_template_kwargs``: as in Chat Completions."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextParam] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingConfig | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())

    @property
    def stop_param(self) -> str:
        return "stop_sequences"


class CountTokensRequest(MessagesRequest, frozen=True, kw_only=True):
    """What would be the prompt is counted; nothing is generated, so a limit is not asked for."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class CountTokensResponse(msgspec.Struct, frozen=True):
    input_tokens: int


# The answer


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """``input``: a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """What was written under a breakpoint, by how long it is kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt has ``input_tokens`` + ``cache_read_input_tokens`` + ``cache_creation_input_tokens``: those that were computed
    without being kept on request, those read from the cache, and those newly written to it under a breakpoint.
    ``unpinned_tokens`` (ours): so many were to be kept and are not, since the tenant's share is used up."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    unpinned_tokens: int | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """``nvext``: only where the request asks for it."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessagesUsage
    nvext: NvExtAnswer | UnsetType = UNSET


# Events of a stream. Each event's name is its type.


class _Event(msgspec.Struct, frozen=True, tag_field="type"):
    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class MessageStart(_Event, frozen=True, tag="message_start"):
    message: Message


class ContentBlockStart(_Event, frozen=True, tag="content_block_start"):
    """The block without its content, which follows in deltas."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(_Event, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(_Event, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(_Event, frozen=True, tag="message_delta"):
    """``usage``: cumulative, it replaces that of ``message_start``. ``nvext``: only where the request asks for it."""

    delta: StopDelta
    usage: MessagesUsage
    nvext: NvExtAnswer | UnsetType = UNSET


class MessageStop(_Event, frozen=True, tag="message_stop"):
    pass


class Ping(_Event, frozen=True, tag="ping"):
    pass


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
StreamEvent = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping
