"""``POST /v1/responses`` and ``POST /v1/responses/compact``: the request bodies and their checks.

Items and tools stay the plain JSON that the client sent: they are kept and echoed as they are, and read through the types in
``items`` and ``tools``.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvbus_protocols.decoding import converted
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.generation import GenerationRequest
from kvbus_protocols.headers import TURN_METADATA
from kvbus_protocols.responses.items import Item
from kvbus_protocols.responses.tools import Tool, ToolSelection, check_selection, selection_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")
TRUNCATIONS = ("auto", "disabled")
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


class ReasoningWish(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextWish(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ConversationRequest(GenerationRequest, frozen=True, kw_only=True):
    """What creating and compacting have in common. ``input``: text, or items; ``client_metadata``: what Codex says besides."""

    input: str | list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    client_metadata: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    @property
    def turn_metadata(self) -> str | None:
        """Of this request, also where the headers are those of a connection that carries many."""
        metadata = self.client_metadata
        found = metadata.get(TURN_METADATA) if isinstance(metadata, dict) else None
        return found if isinstance(found, str) else None

    def typed_tools(self) -> list[Tool]:
        return [converted(tool, Tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())]

    def check_input(self) -> None:
        """Raise InvalidRequest when there is no input, or fields of items have the wrong type."""
        if self.input is None and self.previous_response_id is None:
            raise InvalidRequest(
                "One of 'input' or 'previous_response_id' must be provided.",
                param="input",
                code="missing_required_parameter",
            )
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise InvalidRequest("Invalid 'input': empty array.", param="input", code="empty_array")
        for i, item in enumerate(self.items):
            converted(item, Item, f"input[{i}]")


class ResponsesRequest(ConversationRequest, frozen=True, kw_only=True):
    """``generate`` false: compute the prompt and nothing more, as a beginning of what follows. Unknown fields are ignored."""

    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextWish | None = None
    reasoning: ReasoningWish | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    generate: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.includes(INCLUDE_LOGPROBS) or self.top_logprobs else None

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    @property
    def wants_store(self) -> bool:
        return self.store is not False

    @property
    def wants_summary(self) -> bool:
        wish = self.reasoning
        return wish is not None and bool(wish.summary or wish.generate_summary)

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Asked for; and when nothing is stored, the thoughts of a turn live on in what the client keeps only."""
        return self.includes(INCLUDE_ENCRYPTED_REASONING) or not self.wants_store

    def selection(self) -> ToolSelection:
        return selection_of(self.tool_choice)

    def check(self) -> None:
        """Raise InvalidRequest for what the types alone cannot say. Items are checked when they are turned into turns."""
        self.check_generation()
        self.check_input()
        if self.n not in (None, 1):
            raise InvalidRequest("'n' is not supported: a response has one output.", param="n", code="unsupported")
        self._check_unsupported()
        _one_of(self.truncation, TRUNCATIONS, "truncation")
        if self.reasoning is not None:
            _one_of(self.reasoning.effort, EFFORTS, "reasoning.effort")
            _one_of(self.reasoning.summary, SUMMARIES, "reasoning.summary")
        if self.background and not self.wants_store:
            raise InvalidRequest("Background mode requires 'store' to be true.", param="background")
        if self.top_logprobs and not self.includes(INCLUDE_LOGPROBS) and self.include is not None:
            raise InvalidRequest(f"'top_logprobs' needs '{INCLUDE_LOGPROBS}' in 'include'.", param="top_logprobs")
        _check_metadata(self.metadata or {})
        _check_format(self.text.format if self.text is not None else None)
        check_selection(self.selection(), self.typed_tools(), may_come_later=self._brings_tools)

    @property
    def _brings_tools(self) -> bool:
        return any(item.get("type") in ("additional_tools", "tool_search_output") for item in self.items)

    def _check_unsupported(self) -> None:
        for name, value in (("conversation", self.conversation), ("prompt", self.prompt)):
            if value is not None:
                raise InvalidRequest(f"'{name}' is not supported by this server.", param=name, code="unsupported")


class CompactRequest(ConversationRequest, frozen=True, kw_only=True):
    def check(self) -> None:
        self.check_generation()
        self.check_input()


def _one_of(value: str | None, known: tuple[str, ...], param: str) -> None:
    if value is not None and value not in known:
        values = ", ".join(f"'{name}'" for name in known[:-1]) + f", and '{known[-1]}'"
        raise InvalidRequest(
            f"Invalid value: '{value}'. Supported values are: {values}.", param=param, code="invalid_value"
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"'metadata' has {len(metadata)} entries; at most {MAX_METADATA} are allowed.",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"A key of 'metadata' has at most {MAX_METADATA_KEY} characters, a value {MAX_METADATA_VALUE}.",
                param=f"metadata.{key[:MAX_METADATA_KEY]}",
                code="string_above_max_length",
            )


def _check_format(wanted: TextFormat | None) -> None:
    if wanted is None or wanted.type in ("text", "json_object"):
        return
    if wanted.type != "json_schema":
        _one_of(wanted.type, ("text", "json_object", "json_schema"), "text.format.type")
    for name, value in (("name", wanted.name), ("schema", wanted.schema)):
        if value is None:
            param = f"text.format.{name}"
            raise InvalidRequest(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
