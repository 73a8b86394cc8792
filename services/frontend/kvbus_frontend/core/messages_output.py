"""The output of a choice as an answer of the Messages API."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_frontend.core.json_object import ObjectText, complete_members
from kvbus_frontend.core.nvext_report import NvExtReport, extra_fields
from kvbus_frontend.core.outputs import ChoiceOutput, Finish
from kvbus_frontend.core.retention import Lease, created
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols import sse
from kvbus_protocols.errors import ApiError, anthropic_body
from kvbus_protocols.generation import Usage
from kvbus_protocols.messages import (
    BlockEvent,
    CacheCreation,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from kvbus_protocols.messages_echo import sign_thought, tool_use_id

NO_INPUT = msgspec.Raw(b"{}")


class MessagesOutput:
    """``leases``: what became of the request's cache breakpoints. ``report``: what is to be told besides the answer."""

    def __init__(
        self, message_id: str, model: str, *, leases: Sequence[Lease] = (), report: NvExtReport | None = None
    ) -> None:
        self._id = message_id
        self._model = model
        self._leases = leases
        self._report = report
        self._blocks = Blocks()
        self._finish = Finish("stop")

    def opening(self, usage: Usage) -> Iterator[bytes]:
        yield _sse(MessageStart(self._message([], None, None, usage)))

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[bytes]:
        for output in outputs:
            for event in output.events:
                yield from map(_sse, self._blocks.take(event))
            self._finish = output.finish or self._finish

    def closing(self, usage: Usage) -> Iterator[bytes]:
        yield from map(_sse, self._blocks.close())
        yield _sse(MessageDelta(StopDelta(*self._stop()), self._usage(usage), extra_fields(self._report, usage)))
        yield _sse(MessageStop())

    def failure(self, error: ApiError) -> Iterator[bytes]:
        """No more events follow it, an open block stays open."""
        yield sse.event(anthropic_body(error, self._id), "error")

    def keep_alive(self) -> bytes:
        return _sse(Ping())

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> Message:
        """Put together from the very events that would be streamed."""
        events: list[BlockEvent] = []
        for output in outputs:
            for event in output.events:
                events += self._blocks.take(event)
            self._finish = output.finish or self._finish
        events += self._blocks.close()
        message = self._message(assembled(events), *self._stop(), usage)
        return msgspec.structs.replace(message, nvext=extra_fields(self._report, usage))

    def _message(
        self, content: list[ContentBlock], reason: StopReason | None, sequence: str | None, usage: Usage
    ) -> Message:
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(usage),
        )

    def _stop(self) -> tuple[StopReason, str | None]:
        """A token limit counts even when calls are complete: the model had more to say."""
        finish = self._finish
        if isinstance(finish.stop, str):
            return "stop_sequence", finish.stop
        if finish.reason == "length":
            return "max_tokens", None
        return ("tool_use" if self._blocks.complete_calls else "end_turn"), None

    def _usage(self, usage: Usage) -> MessagesUsage:
        """The three kinds of prompt tokens add up to the prompt."""
        details = usage.prompt_tokens_details
        cached, unpinned = details.cached_tokens, details.unpinned_tokens
        minutes, hours = created(
            self._leases,
            cached=cached,
            prompt=usage.prompt_tokens,
            unpinned=0 if isinstance(unpinned, UnsetType) else unpinned,
        )
        written = minutes + hours
        creation = CacheCreation(ephemeral_5m_input_tokens=minutes, ephemeral_1h_input_tokens=hours)
        thinking = usage.completion_tokens_details.reasoning_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            cache_creation=creation if self._leases else UNSET,
            unpinned_tokens=unpinned,
            output_tokens_details=OutputTokensDetails(thinking) if thinking else UNSET,
        )


class Blocks:
    """Events of an output to events of content blocks, which are numbered from 0 and never overlap.

    A call's block ends with the call, so that a client can act upon it before the next token. ``complete_calls``: how many did.
    """

    def __init__(self) -> None:
        self._index = 0
        self._open: str = ""
        self._thought: list[str] = []
        self._input = ObjectText()
        self.complete_calls = 0

    def take(self, event: Event) -> Iterator[BlockEvent]:
        match event:
            case Text(text) if text:
                if self._open != "text":
                    yield from self._start("text", TextBlock(""))
                yield ContentBlockDelta(self._index, TextDelta(text))
            case Reasoning(text) if text:
                if self._open != "thinking":
                    yield from self._start("thinking", ThinkingBlock("", ""))
                self._thought.append(text)
                yield ContentBlockDelta(self._index, ThinkingDelta(text))
            case ReasoningEnded():
                if self._open == "thinking":
                    yield from self.close()
            case CallStarted(_, call_id, name):
                yield from self._start("tool_use", ToolUseBlock(tool_use_id(call_id), name, NO_INPUT))
                self._input = ObjectText()
            case CallArguments(_, text):
                yield from self._input_delta(self._input.feed(text))
            case CallEnded():
                self.complete_calls += 1
                yield from self._input_delta(self._input.end())  # "{}" if need be: some clients parse the deltas alone
                self._input = ObjectText()
                yield from self.close()

    def close(self) -> Iterator[BlockEvent]:
        """The end of the block that is open, if one is. Of a call that was cut off nothing is made up."""
        if not self._open:
            return
        if self._open == "thinking":
            yield ContentBlockDelta(self._index, SignatureDelta(sign_thought("".join(self._thought))))
            self._thought = []
        if self._open == "tool_use":
            yield from self._input_delta(self._input.rest())
        yield ContentBlockStop(self._index)
        self._open = ""
        self._index += 1

    def _input_delta(self, text: str) -> Iterator[BlockEvent]:
        if text:
            yield ContentBlockDelta(self._index, InputJsonDelta(text))

    def _start(self, kind: str, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = kind
        yield ContentBlockStart(self._index, block)


def assembled(events: Iterable[BlockEvent]) -> list[ContentBlock]:
    """The blocks that a client makes out of such events."""
    blocks: list[ContentBlock] = []
    pieces: list[str] = []
    signature = ""
    for event in events:
        match event:
            case ContentBlockStart(_, block):
                blocks.append(block)
                pieces, signature = [], ""
            case ContentBlockDelta(_, TextDelta(piece) | ThinkingDelta(piece) | InputJsonDelta(piece)):
                pieces.append(piece)
            case ContentBlockDelta(_, SignatureDelta(signed)):
                signature = signed
            case ContentBlockStop():
                blocks[-1] = _filled(blocks[-1], "".join(pieces), signature)
    return blocks


def _filled(block: ContentBlock, content: str, signature: str) -> ContentBlock:
    match block:
        case TextBlock():
            return TextBlock(content)
        case ThinkingBlock():
            return ThinkingBlock(content, signature)
        case ToolUseBlock(call_id, name):
            # As the model wrote it; of a call that was cut off what can be read, since the API wants an object in any case.
            return ToolUseBlock(call_id, name, msgspec.Raw(complete_members(content)))


def _sse(event: StreamEvent) -> bytes:
    return sse.event(event, event.name)
