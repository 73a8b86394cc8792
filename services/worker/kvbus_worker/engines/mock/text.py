"""What a sequence consists of, as far as block bookkeeping sees it: a length, and the keys of its whole blocks."""

from collections.abc import Sequence
from typing import Protocol

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_wire.packing import TOKEN_BYTES, pack_tokens


class Text(Protocol):
    """Prompt and output of one sequence; grows at its end. Simulations bring one that has keys without tokens."""

    def __len__(self) -> int:
        """In tokens."""

    def append(self, tokens: Sequence[int]) -> None: ...

    def keys(self, count: int) -> Sequence[bytes]:
        """Keys of the first ``count`` whole blocks."""

    def blocks(self, start: int, end: int) -> tuple[bytes, Sequence[bytes], Sequence[bytes]]:
        """The key above whole block ``start``, then keys and packed tokens of those from ``start`` to before ``end``."""


class TokenText:
    """`Text` over token ids; a key is computed when it is asked for first."""

    def __init__(self, tokens: Sequence[int], domain_key: bytes, block_size: int) -> None:
        self._tokens = list(tokens)
        self._domain_key = domain_key
        self._block_size = block_size
        self._packed = b""
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def keys(self, count: int) -> Sequence[bytes]:
        self._compute_keys(count)
        return self._keys[:count]

    def blocks(self, start: int, end: int) -> tuple[bytes, Sequence[bytes], Sequence[bytes]]:
        self._compute_keys(end)
        size = self._block_size * TOKEN_BYTES
        parent = self._keys[start - 1] if start else ROOT
        tokens = [self._packed[at : at + size] for at in range(start * size, end * size, size)]
        return parent, self._keys[start:end], tokens

    def _compute_keys(self, count: int) -> None:
        if count > len(self._keys):
            size = self._block_size * TOKEN_BYTES
            self._packed += pack_tokens(self._tokens[len(self._packed) // TOKEN_BYTES :])
            parent = self._keys[-1] if self._keys else ROOT
            fresh = memoryview(self._packed)[len(self._keys) * size : count * size]
            self._keys += chain_keys(self._domain_key, fresh, self._block_size, parent)
