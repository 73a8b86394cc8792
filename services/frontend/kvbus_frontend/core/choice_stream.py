"""One choice: tokens in; text, reasoning and tool calls out, up to a stop string."""

from collections.abc import Callable, Sequence

import msgspec

from kvbus_frontend.core.choice_text import ChoiceText, TokenText
from kvbus_frontend.core.outputs import Finish
from kvbus_parsers import CallEnded, Event, Parser, Text
from kvbus_wire.frontend import TokenLogprob


class Said(msgspec.Struct, frozen=True):
    """What has become certain. ``finish``: the choice ends here by itself, whatever the engine still has to say."""

    events: tuple[Event, ...] = ()
    tokens: tuple[TokenText, ...] = ()
    finish: Finish | None = None


class ChoiceStream:
    """Text and parser of one choice. Both go on unchanged when the request migrates to another worker."""

    def __init__(
        self,
        text: ChoiceText,
        parser: Parser | None = None,
        *,
        max_calls: int | None = None,
        on_call: Callable[[CallEnded], None] | None = None,
    ) -> None:
        """``parser``: None where all output is text. ``max_calls``: the choice ends after that many tool calls.

        ``on_call`` is told of each call that is complete.
        """
        self._text = text
        self._parser = parser
        self._calls_left = max_calls
        self._on_call = on_call
        self.reasoning_tokens = 0
        self.token_ids: list[int] = []

    @property
    def output_tokens(self) -> int:
        return self._text.output_tokens

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Said:
        """Tokens after the one that ends the choice are not consumed."""
        if self._parser is None:
            return self._take(tokens, logprobs)
        events: list[Event] = []
        shown: list[TokenText] = []
        for i, token in enumerate(tokens):  # one by one, so that each counts as what it is
            before = self._parser.in_reasoning
            said = self._take((token,), logprobs[i : i + 1])
            self.reasoning_tokens += before or self._parser.in_reasoning
            events += said.events
            shown += said.tokens
            if said.finish is not None:
                return Said(tuple(events), tuple(shown), said.finish)
        return Said(tuple(events), tuple(shown))

    def finish(self, finish: Finish) -> Said:
        """The rest, when the engine has ended the choice."""
        piece = self._text.finish()
        if self._text.matched is not None:
            finish = Finish("stop", self._text.matched)
        events = (*self._feed(piece.text), *self._end(finish))
        end = self._last_call(events)
        if end is not None:
            return self._said(events[:end], piece.tokens, Finish("stop"))
        return self._said(events, piece.tokens, finish)

    def _take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Said:
        before = self._text.output_tokens
        piece = self._text.push(tokens, logprobs)
        self.token_ids += tokens[: self._text.output_tokens - before]
        events = self._feed(piece.text)
        end = self._last_call(events)
        if end is not None:
            return self._said(events[:end], piece.tokens, Finish("stop"))
        if self._text.matched is not None:
            finish = Finish("stop", self._text.matched)
            return self._said((*events, *self._end(finish)), piece.tokens, finish)
        return self._said(events, piece.tokens)

    def _said(self, events: Sequence[Event], tokens: tuple[TokenText, ...], finish: Finish | None = None) -> Said:
        if self._on_call is not None:
            for event in events:
                if isinstance(event, CallEnded):
                    self._on_call(event)
        return Said(tuple(events), tokens, finish)

    def _last_call(self, events: Sequence[Event]) -> int | None:
        """Where the events end with the last call that is allowed; None: they do not."""
        if self._calls_left is not None:
            for i, event in enumerate(events):
                self._calls_left -= isinstance(event, CallEnded)
                if self._calls_left <= 0:
                    return i + 1
        return None

    def _feed(self, text: str) -> Sequence[Event]:
        if not text:
            return ()
        return self._parser.feed(text) if self._parser is not None else (Text(text),)

    def _end(self, finish: Finish) -> Sequence[Event]:
        if self._parser is None:
            return ()
        if isinstance(finish.stop, str):
            return self._parser.finish("stop_sequence")
        return self._parser.finish("length" if finish.reason == "length" else "stop")
