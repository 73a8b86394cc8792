"""Text to token ids and back for the mock engine, and the tokens of made-up output."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from kvbus_tokenizers import Tokenizer
from kvbus_wire.packing import pack_tokens

_MAX_WORDS = 4096
_WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
_DRAWS_PER_HASH = 16
_DRAW_BYTES = 4


class Vocabulary(Protocol):
    """What the mock engine needs from a tokenizer."""

    @property
    def words(self) -> Sequence[int]:
        """Ids that look harmless in any text, for made-up output; never empty."""

    def encode(self, text: str) -> list[int]:
        """Ids of raw model output: special tokens count as such, none are added. Raise ValueError for lone surrogates."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text with special tokens kept."""


class TokenizerVocabulary:
    """The vocabulary of a model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = _words(tokenizer)

    @property
    def words(self) -> Sequence[int]:
        return self._words

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep_special=True)


def _words(tokenizer: Tokenizer) -> list[int]:
    """The first ids that spell lower-case letters and spaces only."""
    words: list[int] = []
    for token in range(tokenizer.vocab_size):
        spelling = tokenizer.token_bytes(token)
        if spelling and token not in tokenizer.added_tokens and _WORD_BYTES.issuperset(spelling):
            words.append(token)
            if len(words) == _MAX_WORDS:
                break
    return words or [0]


def made_up_tokens(prompt: Sequence[int], words: Sequence[int], count: int) -> list[int]:
    """Deterministic output: token i is a function of (prompt, i) alone, so any worker continues it the same way."""
    seed = blake2b(pack_tokens(prompt), digest_size=32).digest()
    tokens: list[int] = []
    for start in range(0, count, _DRAWS_PER_HASH):
        draws = blake2b(start.to_bytes(8, "little"), digest_size=_DRAWS_PER_HASH * _DRAW_BYTES, key=seed).digest()
        numbers = (int.from_bytes(draws[i : i + _DRAW_BYTES], "little") for i in range(0, len(draws), _DRAW_BYTES))
        tokens.extend(words[number % len(words)] for number in numbers)
    return tokens[:count]
