"""What the choices of a request have produced and the client has not been sent yet: bounded, and merged when it waits."""

import msgspec

from kvbus_frontend.core.choice_text import Piece, TokenText


class Finish(msgspec.Struct, frozen=True):
    """``reason``: stop or length; ``stop``: the stop string or stop token id that ended the choice."""

    reason: str
    stop: str | int | None = None


class ChoiceOutput(msgspec.Struct, frozen=True):
    """The next text of one choice, and its end if that follows."""

    index: int
    text: str
    tokens: tuple[TokenText, ...] = ()
    finish: Finish | None = None


class BufferFull(Exception):
    """The client reads slower than the model writes, for too long."""


class OutputBuffer:
    """Text of several choices in the order it came; what waits of one choice becomes one output."""

    def __init__(self, limit_chars: int) -> None:
        self._limit = limit_chars
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[TokenText]] = {}
        self._finishes: dict[int, Finish] = {}
        self.chars = 0

    def __bool__(self) -> bool:
        return bool(self._texts or self._finishes)

    def put(self, index: int, piece: Piece) -> None:
        """Raise BufferFull when more than the limit waits."""
        if not piece:
            return
        self._texts.setdefault(index, []).append(piece.text)
        if piece.tokens:
            self._tokens.setdefault(index, []).extend(piece.tokens)
        self.chars += len(piece.text)
        if self.chars > self._limit:
            raise BufferFull(f"more than {self._limit} characters wait for the client")

    def finish(self, index: int, finish: Finish) -> None:
        self._finishes[index] = finish

    def take(self) -> list[ChoiceOutput]:
        """Everything that waits; the buffer is empty afterwards."""
        order = dict.fromkeys((*self._texts, *self._finishes))
        outputs = [
            ChoiceOutput(
                index,
                "".join(self._texts.get(index, ())),
                tuple(self._tokens.get(index, ())),
                self._finishes.get(index),
            )
            for index in order
        ]
        self._texts, self._tokens, self._finishes, self.chars = {}, {}, {}, 0
        return outputs
