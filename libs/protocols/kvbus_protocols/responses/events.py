"""Stream events of the Responses API. ``type`` is also the name of the server-sent event.

``sequence_number`` counts all events of one response from 0 on. ``output_index`` is the place of an item in the response's output.
"""

from typing import Literal

import msgspec

from kvbus_protocols.responses.response import Logprob, OutputItem, OutputText, ReasoningText, Response, SummaryText


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Subclasses have a ``type``."""

    sequence_number: int


class ResponseEvent(Event, frozen=True, kw_only=True):
    """``response.created``, ``.queued``, ``.in_progress``, ``.completed``, ``.incomplete``, ``.failed``."""

    type: str
    response: Response


class ItemEvent(Event, frozen=True, kw_only=True):
    """``response.output_item.added`` and ``.done``."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class ContentPartEvent(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: tuple[Logprob, ...] = ()


class TextDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: tuple[Logprob, ...] = ()


class ReasoningDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: int = 0
    delta: str


class ReasoningDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: int = 0
    text: str


class SummaryPartEvent(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int = 0
    part: SummaryText


class SummaryDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    summary_index: int = 0
    delta: str


class SummaryDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    summary_index: int = 0
    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class CustomInputDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class CustomInputDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


class SocketErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    code: str
    message: str
    param: str | None = None


class SocketError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in WebSocket mode; ``status``: what the HTTP response would have had."""

    type: Literal["error"] = "error"
    status: int
    error: SocketErrorDetail
    headers: dict[str, str] = {}
