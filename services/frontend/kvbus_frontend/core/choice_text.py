"""One choice: tokens in, text with its log probabilities out, up to a stop string."""

from collections.abc import Callable, Sequence
from itertools import takewhile

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


class _Waiting(msgspec.Struct):
    """``end``: where the last character that the token has a part in ends; None while that character is not complete."""

    token: TokenText
    end: int | None = None


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
        self._waiting: list[_Waiting] = []
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
                self._waiting.append(_Waiting(TokenText(self._read, logprobs[i])))
            self._read += len(text)
            if not self._detokenizer.has_pending:
                self._settle()
            shown.append(self._matcher.push(text))
            if self.matched is not None:
                break
        return self._show("".join(shown))

    def finish(self) -> Piece:
        """The rest of the text, when no more tokens come."""
        text = self._detokenizer.finish()
        self._read += len(text)
        self._settle()
        return self._show(self._matcher.push(text) + self._matcher.finish())

    def _settle(self) -> None:
        """All characters of the tokens so far are complete: the text of those that wait ends here."""
        for entry in reversed(self._waiting):
            if entry.end is not None:
                break
            entry.end = self._read

    def _show(self, text: str) -> Piece:
        self._shown += len(text)
        if self.matched is not None:  # the text was cut: tokens that begin before the cut belong to it
            ready = [entry.token for entry in self._waiting if entry.token.offset < self._shown]
            self._waiting.clear()
        else:
            ready = [
                entry.token for entry in takewhile(lambda e: e.end is not None and e.end <= self._shown, self._waiting)
            ]
            del self._waiting[: len(ready)]
        return Piece(text, tuple(ready))


def token_text(token_bytes: Callable[[int], bytes], token_id: int) -> tuple[str, list[int]]:
    """A token as log probabilities show it: text (U+FFFD for parts of characters) and bytes."""
    data = token_bytes(token_id)
    return data.decode(errors="replace"), list(data)
