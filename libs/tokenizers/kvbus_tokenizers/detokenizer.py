"""Incremental detokenizing: tokens in, whole characters out."""

import codecs
from collections.abc import Callable, Iterable, Set


class Detokenizer:
    """Turns a growing token sequence into text.

    The concatenation of everything `push` and `finish` return is the text of the whole sequence, however the tokens are
    grouped. A character whose bytes are spread over tokens comes out when it is complete; bytes that never become a character
    come out as U+FFFD.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        hidden: Set[int] = frozenset(),
        special: Set[int] = frozenset(),
        strip_start: int = 0,
    ) -> None:
        """``hidden``: tokens without text. ``strip_start``: how many spaces at the start of the text are dropped.

        ``special``: tokens that are no part of the text proper: its start is after them.
        """
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._special = special
        self._strip = strip_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def has_pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._utf8.getstate()[0])

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        data = bytearray()
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            piece = self._token_bytes(token_id)
            if self._strip and piece and token_id not in self._special:
                piece = self._without_leading_spaces(piece)
            data += piece
        return self._utf8.decode(bytes(data))

    def finish(self) -> str:
        """What is left when no more tokens come. The detokenizer starts a new text afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        # The reference decoder fuses all pieces first, then drops up to `strip_start` spaces from the start of the text.
        while self._strip and piece.startswith(b" "):
            piece = piece[1:]
            self._strip -= 1
        if piece:
            self._strip = 0
        return piece
