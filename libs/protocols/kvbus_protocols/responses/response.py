"""The response object, its output items, and what the other endpoints answer.

Keys are always there, with null where OpenAI says so; where the Open Responses schemas refuse null, the key is left out (UNSET).
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_protocols import generation
from kvbus_protocols.extensions import NvExtAnswer

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ENDED = ("completed", "incomplete", "failed", "cancelled")


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[Logprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class ToolSearchCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["tool_search_call"] = "tool_search_call"
    status: ItemStatus
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Any


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["compaction"] = "compaction"
    encrypted_content: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall | ToolSearchCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """``cache_write_tokens``: newly stored to be kept for the time that the request asks for. ``unpinned_tokens`` (ours): so many
    were to be kept and are not, since the tenant's share is used up."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    unpinned_tokens: int | UnsetType = UNSET


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` includes those that came out of the cache."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: generation.Usage, *, written: int = 0) -> "Usage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                usage.prompt_tokens_details.cached_tokens, written, usage.prompt_tokens_details.unpinned_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class Text(msgspec.Struct, frozen=True):
    """``format``: as the client sent it."""

    format: dict[str, Any]
    verbosity: str | UnsetType = UNSET


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """``nvext``: at the end, and only where the request asks for it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Text
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: Usage | None = None
    user: str | UnsetType = UNSET
    metadata: dict[str, str]
    nvext: NvExtAnswer | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """``output``: items that take the place of the conversation."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Any]
    usage: Usage
