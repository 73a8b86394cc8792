"""Outputs of choices as legacy Completions bodies and chunks, which have one shape. Its text is never parsed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET, UnsetType

from kvbus_frontend.core.choice_text import TokenText, token_text
from kvbus_frontend.core.openai_stream import LOWEST_LOGPROB, Envelope, OpenAiStream, stop_reason_of
from kvbus_frontend.core.outputs import ChoiceOutput
from kvbus_parsers import Text
from kvbus_protocols import sse
from kvbus_protocols.completions import Completion, CompletionChoice, CompletionLogprobs
from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import OptionalUsage, Usage


class CompletionOutput(OpenAiStream):
    """``echoes``: the prompt's text per choice, when the request wants it before the output."""

    def __init__(self, envelope: Envelope, echoes: Mapping[int, str] | None = None) -> None:
        super().__init__(envelope)
        self._echoes = dict(echoes or {})
        self._offsets = {index: len(text) for index, text in self._echoes.items()}

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[bytes]:
        for output in outputs:
            yield sse.event(self._wrap([self._choice(output)], self._no_usage))

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> Completion:
        return self._wrap([self._choice(output) for output in outputs], usage, self._nvext(usage))

    def _choice(self, output: ChoiceOutput) -> CompletionChoice:
        finish = output.finish
        return CompletionChoice(
            index=output.index,
            text=self._echoes.pop(output.index, "") + "".join(e.text for e in output.events if isinstance(e, Text)),
            logprobs=self._logprobs(output) if self._envelope.logprobs and output.tokens else None,
            finish_reason=finish.reason if finish is not None else None,
            stop_reason=stop_reason_of(finish) if finish is not None else UNSET,
        )

    def _bare(self, usage: OptionalUsage, nvext: NvExtAnswer | UnsetType) -> Completion:
        return self._wrap([], usage, nvext)

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
