"""Outputs of choices as Chat Completions bodies and chunks."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_frontend.core.chat_calls import CallDeltas, whole_call, whole_calls
from kvbus_frontend.core.choice_text import TokenText, token_text
from kvbus_frontend.core.openai_stream import LOWEST_LOGPROB, Envelope, OpenAiStream, stop_reason_of
from kvbus_frontend.core.outputs import ChoiceOutput, Finish
from kvbus_parsers import CallEnded, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols import sse
from kvbus_protocols.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChoiceLogprobs,
    ContentLogprob,
    ReasoningDispatch,
    ToolCallDispatch,
    TopLogprob,
)
from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import OptionalUsage, Usage


class ChatStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How this API is spoken. ``reasoning_content``, ``reasoning``: the fields that thoughts go to.

    ``dispatch_tools``, ``dispatch_reasoning``: extra events the moment a call or a thought is complete.
    ``events_are_chunks``: the client takes every event for a chunk, whatever its name.
    ``named_choice``: the request named one tool; OpenAI reports such a call with the finish reason stop.
    ``custom_tools``: names of the tools whose input is text.
    """

    reasoning_content: bool = True
    reasoning: bool = False
    dispatch_tools: bool = False
    dispatch_reasoning: bool = False
    events_are_chunks: bool = False
    named_choice: bool = False
    custom_tools: frozenset[str] = frozenset()


class ChatOutput(OpenAiStream):
    """Makes the chunks of a stream, or the whole response, of one request."""

    def __init__(self, envelope: Envelope, style: ChatStyle) -> None:
        super().__init__(envelope)
        self._style = style
        self._opened: set[int] = set()
        self._calls: dict[int, CallDeltas] = {}
        self._thoughts: dict[int, list[str]] = {}

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[bytes]:
        for output in outputs:
            index, logprobs = output.index, self._logprobs(output.tokens)
            if index not in self._opened:
                yield self._open(index)
            for event in output.events:
                yield from self._dispatches(index, event)
                if (delta := self._delta(index, event)) is not None:
                    yield self._chunk(index, delta, logprobs)
                    logprobs = None
            if logprobs is not None:  # of tokens that are markers, or whose text is held back
                yield self._chunk(index, ChatDelta(content=""), logprobs)
            if output.finish is not None:
                yield self._chunk(index, ChatDelta(), finish=output.finish)

    def keep_alive(self) -> bytes:
        """A chunk that says nothing, since some clients (Qwen Code) count chunks, not bytes; each choice begins but once."""
        return self._chunk(0, ChatDelta()) if 0 in self._opened else self._open(0)

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> ChatCompletion:
        envelope = self._envelope
        return ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(output) for output in outputs],
            usage=usage,
            system_fingerprint=envelope.fingerprint,
            nvext=self._nvext(usage),
        )

    def _open(self, index: int) -> bytes:
        self._opened.add(index)
        self._calls[index] = CallDeltas(self._style.custom_tools)
        return self._chunk(index, ChatDelta(role="assistant", content=""))

    def _dispatches(self, index: int, event: Event) -> Iterator[bytes]:
        """Ahead of the standard chunks: what is complete can be acted upon now."""
        style = self._style
        choices: list[str] | UnsetType = [] if style.events_are_chunks else UNSET
        if style.dispatch_tools and isinstance(event, CallEnded):
            call = whole_call(event, style.custom_tools, index=event.index)
            yield sse.event(ToolCallDispatch(index, call, choices), "tool_call_dispatch")
        if style.dispatch_reasoning and isinstance(event, Reasoning):
            self._thoughts.setdefault(index, []).append(event.text)
        if style.dispatch_reasoning and isinstance(event, ReasoningEnded):
            thought = "".join(self._thoughts.pop(index, ()))
            yield sse.event(ReasoningDispatch(index, thought, choices), "reasoning_dispatch")

    def _delta(self, index: int, event: Event) -> ChatDelta | None:
        match event:
            case Text(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(
                    reasoning_content=text if self._style.reasoning_content else UNSET,
                    reasoning=text if self._style.reasoning else UNSET,
                )
        call = self._calls[index].delta(event)
        return None if call is None else ChatDelta(tool_calls=[call])

    def _finish_reason(self, finish: Finish, complete_calls: int) -> str:
        called = complete_calls and finish.reason == "stop" and not isinstance(finish.stop, str)
        return "tool_calls" if called and not self._style.named_choice else finish.reason

    def _choice(self, output: ChoiceOutput) -> ChatChoice:
        finish = output.finish or Finish("stop")
        calls, complete = whole_calls(output.events, self._style.custom_tools)
        text = "".join(event.text for event in output.events if isinstance(event, Text))
        thought = "".join(event.text for event in output.events if isinstance(event, Reasoning))
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(
                content=text if text or not (calls or thought) else None,
                tool_calls=calls or UNSET,
                reasoning_content=thought if thought and self._style.reasoning_content else UNSET,
                reasoning=thought if thought and self._style.reasoning else UNSET,
            ),
            logprobs=self._logprobs(output.tokens) or (ChoiceLogprobs([]) if self._envelope.logprobs else None),
            finish_reason=self._finish_reason(finish, complete),
            stop_reason=stop_reason_of(finish),
        )

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChoiceLogprobs | None = None, *, finish: Finish | None = None
    ) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=self._finish_reason(finish, self._calls[index].complete) if finish is not None else None,
            stop_reason=stop_reason_of(finish) if finish is not None else UNSET,
        )
        return sse.event(self._wrap([choice], self._no_usage))

    def _bare(self, usage: OptionalUsage, nvext: NvExtAnswer | UnsetType) -> ChatChunk:
        return self._wrap([], usage, nvext)

    def _wrap(
        self,
        choices: list[ChatChunkChoice],
        usage: OptionalUsage,
        nvext: NvExtAnswer | UnsetType = UNSET,
    ) -> ChatChunk:
        envelope = self._envelope
        return ChatChunk(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=usage,
            system_fingerprint=envelope.fingerprint,
            nvext=nvext,
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> ChoiceLogprobs | None:
        if not tokens:
            return None
        return ChoiceLogprobs([self._logprob(token) for token in tokens])

    def _logprob(self, token: TokenText) -> ContentLogprob:
        entry = token.logprob
        text, data = token_text(self._envelope.token_bytes, entry.token_id)
        return ContentLogprob(text, max(entry.logprob, LOWEST_LOGPROB), data, [self._top(*item) for item in entry.top])

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text, data = token_text(self._envelope.token_bytes, token_id)
        return TopLogprob(text, max(logprob, LOWEST_LOGPROB), data)
