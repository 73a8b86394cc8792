"""Outputs of choices as Chat Completions bodies and chunks."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_frontend.core.choice_text import TokenText, token_text
from kvbus_frontend.core.outputs import ChoiceOutput, Finish
from kvbus_protocols.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChoiceLogprobs,
    ContentLogprob,
    TopLogprob,
)
from kvbus_protocols.generation import Usage

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI uses this number for it."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of one response share. ``logprobs``: the request asked for them."""

    id: str
    created: int
    model: str
    fingerprint: str
    token_bytes: Callable[[int], bytes]
    logprobs: bool = False
    stream_usage: bool = False


def stop_reason_of(finish: Finish) -> str | int | UnsetType:
    return UNSET if finish.stop is None else finish.stop


class ChatOutput:
    """Makes the chunks of a stream, or the whole response, of one request."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._opened: set[int] = set()

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[ChatChunk]:
        for output in outputs:
            yield from self.opening(output.index)
            if output.text or output.tokens:
                yield self._chunk(output.index, ChatDelta(content=output.text), self._logprobs(output.tokens))
            if output.finish is not None:
                yield self._chunk(output.index, ChatDelta(), None, output.finish)

    def opening(self, index: int) -> Iterator[ChatChunk]:
        """The chunk with the role, once per choice."""
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(index, ChatDelta(role="assistant", content=""), None)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._wrap([], usage)

    def completion(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> ChatCompletion:
        envelope = self._envelope
        return ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(output) for output in outputs],
            usage=usage,
            system_fingerprint=envelope.fingerprint,
        )

    def _choice(self, output: ChoiceOutput) -> ChatChoice:
        finish = output.finish or Finish("stop")
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(content=output.text),
            logprobs=self._logprobs(output.tokens) or (ChoiceLogprobs([]) if self._envelope.logprobs else None),
            finish_reason=finish.reason,
            stop_reason=stop_reason_of(finish),
        )

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChoiceLogprobs | None, finish: Finish | None = None
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish.reason if finish is not None else None,
            stop_reason=stop_reason_of(finish) if finish is not None else UNSET,
        )
        return self._wrap([choice], None if self._envelope.stream_usage else UNSET)

    def _wrap(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        envelope = self._envelope
        return ChatChunk(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=usage,
            system_fingerprint=envelope.fingerprint,
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
