"""Outputs of choices as legacy Completions bodies and chunks, which have one shape. Its text is never parsed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET, UnsetType

from kvbus_frontend.core.chat_output import LOWEST_LOGPROB, Envelope, stop_reason_of
from kvbus_frontend.core.choice_text import TokenText, token_text
from kvbus_frontend.core.outputs import ChoiceOutput
from kvbus_parsers import Text
from kvbus_protocols import sse
from kvbus_protocols.completions import Completion, CompletionChoice, CompletionLogprobs
from kvbus_protocols.errors import ApiError
from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import OptionalUsage, Usage


class CompletionOutput:
    """``echoes``: the prompt's text per choice, when the request wants it before the output."""

    def __init__(self, envelope: Envelope, echoes: Mapping[int, str] | None = None) -> None:
        self._envelope = envelope
        self._echoes = dict(echoes or {})
        self._offsets = {index: len(text) for index, text in self._echoes.items()}

    def opening(self, usage: Usage) -> Iterator[bytes]:
        if self._envelope.report is not None:
            yield from self._envelope.report.opening()

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[bytes]:
        for output in outputs:
            yield sse.event(self._wrap([self._choice(output)], None if self._envelope.stream_usage else UNSET))

    def closing(self, usage: Usage) -> Iterator[bytes]:
        report = self._envelope.report
        if report is not None:
            yield from report.closing(usage)
            if (answer := report.answer(usage)) is not None:
                yield sse.event(self._wrap([], None if self._envelope.stream_usage else UNSET, answer))
        if self._envelope.stream_usage:
            yield sse.event(self._wrap([], usage))
        yield sse.DONE

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield sse.event(error.body)

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> Completion:
        report = self._envelope.report
        answer = report.answer(usage) if report is not None else None
        return self._wrap([self._choice(output) for output in outputs], usage, answer or UNSET)

    def _choice(self, output: ChoiceOutput) -> CompletionChoice:
        finish = output.finish
        return CompletionChoice(
            index=output.index,
            text=self._echoes.pop(output.index, "") + "".join(e.text for e in output.events if isinstance(e, Text)),
            logprobs=self._logprobs(output) if self._envelope.logprobs and output.tokens else None,
            finish_reason=finish.reason if finish is not None else None,
            stop_reason=stop_reason_of(finish) if finish is not None else UNSET,
        )

    def _wrap(
        self, choices: list[CompletionChoice], usage: OptionalUsage, nvext: NvExtAnswer | UnsetType = UNSET
    ) -> Completion:
        envelope = self._envelope
        return Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=usage,
            system_fingerprint=envelope.fingerprint,
            nvext=nvext,
        )

    def _logprobs(self, output: ChoiceOutput) -> CompletionLogprobs:
        shift = self._offsets.get(output.index, 0)
        tokens = output.tokens
        return CompletionLogprobs(
            tokens=[self._text(token.logprob.token_id) for token in tokens],
            token_logprobs=[max(token.logprob.logprob, LOWEST_LOGPROB) for token in tokens],
            top_logprobs=[self._top(token) for token in tokens] if any(token.logprob.top for token in tokens) else None,
            text_offset=[shift + token.offset for token in tokens],
        )

    def _top(self, token: TokenText) -> dict[str, float]:
        # Several tokens may show the same text (parts of characters): the most likely one keeps it.
        top: dict[str, float] = {}
        for token_id, logprob in token.logprob.top:
            top.setdefault(self._text(token_id), max(logprob, LOWEST_LOGPROB))
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._envelope.token_bytes, token_id)[0]
