"""One choice: tokens in, text with its log probabilities out, up to a stop string."""

from collections.abc import Callable, Sequence

import msgspec

from kvbus_frontend.core.stops import StopMatcher
from kvbus_tokenizers import Detokenizer
from kvbus_wire.frontend import TokenLogprob


class TokenText(msgspec.Struct, frozen=True):
    """An output token with its log probability; ``offset``: where it begins in the choice's text, in characters."""

    offset: int
    logprob: TokenLogprob


class Piece(msgspec.Struct, frozen=True):
    """What can be shown now."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class ChoiceText:
    """Detokenizer and stop matcher of one choice. Both go on unchanged when the request migrates to another worker.

    Log probabilities come out together with the text of their token: held back as long as it is, and dropped with it when it is a
    part of a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, token_by_token: bool = False) -> None:
        """``token_by_token``: needed to match stop strings and log probabilities to tokens exactly."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._single = token_by_token or bool(stops)
        self._read = 0
        self._shown = 0
        self._waiting: list[TokenText] = []
        self.output_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Piece:
        """Tokens after the one that completes a stop string are not consumed."""
        if not self._single:
            self.output_tokens += len(tokens)
            return self._show(self._matcher.push(self._detokenizer.push(tokens)))
        shown: list[str] = []
        for i, token in enumerate(tokens):
            text = self._detokenizer.push((token,))
            self.output_tokens += 1
            if i < len(logprobs):
                self._waiting.append(TokenText(self._read, logprobs[i]))
            self._read += len(text)
            shown.append(self._matcher.push(text))
            if self.matched is not None:
                break
        return self._show("".join(shown))

    def finish(self) -> Piece:
        """The rest of the text, when no more tokens come."""
        text = self._matcher.push(self._detokenizer.finish())
        return self._show(text + self._matcher.finish(), last=True)

    def _show(self, text: str, *, last: bool = False) -> Piece:
        self._shown += len(text)
        ended = last or self.matched is not None
        ready = self._releasable(ended)
        released, self._waiting = self._waiting[:ready], [] if ended else self._waiting[ready:]
        return Piece(text, tuple(released))

    def _releasable(self, ended: bool) -> int:
        # A token is shown when all of its text is; its end is the next token's offset, or for the last one all that was read.
        # When a stop string has cut the text, tokens that begin before the cut are shown.
        tokens = self._waiting
        if ended:
            cut = self.matched is not None
            return sum(token.offset < self._shown or not cut for token in tokens)
        ends = [token.offset for token in tokens[1:]] + [self._read] * bool(tokens)
        return sum(end <= self._shown for end in ends)


def token_text(token_bytes: Callable[[int], bytes], token_id: int) -> tuple[str, list[int]]:
    """A token as log probabilities show it: text (U+FFFD for parts of characters) and bytes."""
    data = token_bytes(token_id)
    return data.decode(errors="replace"), list(data)
