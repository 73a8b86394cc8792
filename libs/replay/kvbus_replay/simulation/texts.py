"""Prompts and outputs without tokens, for an engine that only needs lengths and block keys."""

from collections.abc import Sequence
from itertools import count

from kvbus_blocks.keys import KEY_BYTES, ROOT

_unknown = count(1)


class KeyedText:
    """`kvbus_worker.engines.mock.text.Text` over given keys. Blocks beyond them, of output whose keys the trace does not tell, get
    keys that nothing else has."""

    def __init__(self, tokens: int, keys: list[bytes]) -> None:
        self._tokens = tokens
        self._keys = keys

    def __len__(self) -> int:
        return self._tokens

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens += len(tokens)

    def keys(self, count: int) -> Sequence[bytes]:
        self._extend(count)
        return self._keys[:count]

    def blocks(self, start: int, end: int) -> tuple[bytes, Sequence[bytes], Sequence[bytes]]:
        self._extend(end)
        return self._keys[start - 1] if start else ROOT, self._keys[start:end], [b""] * (end - start)

    def _extend(self, count: int) -> None:
        while len(self._keys) < count:
            self._keys.append(_unknown_key())


def _unknown_key() -> bytes:
    """The high half, which is zero in keys of traces, tells it apart from them; the low half is spread, as hashes are."""
    number = next(_unknown)
    spread = number * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return spread.to_bytes(8, "little") + number.to_bytes(KEY_BYTES - 8, "little")
