"""Arrays on the wire: token ids as little-endian u32, block keys as 16 raw bytes each."""

import sys
from array import array
from collections.abc import Iterable

from kvbus_blocks.keys import KEY_BYTES, ShortKeys

TOKEN_BYTES = 4


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Raise OverflowError for an id outside 0..2**32-1."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes | memoryview) -> list[int]:
    """Raise ValueError when the length is no multiple of 4."""
    tokens = array("I")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def pack_keys(keys: Iterable[bytes]) -> bytes:
    return b"".join(keys)


def unpack_keys(data: bytes) -> list[bytes]:
    """Raise ValueError when the length is no multiple of 16."""
    if len(data) % KEY_BYTES:
        raise ValueError(f"{len(data)} bytes are no multiple of the key size {KEY_BYTES}")
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]


def short_key(key: bytes) -> int:
    """The low 64 bits, on which indexes route: a collision costs a wrong guess, never a wrong reuse."""
    return int.from_bytes(key[:8], "little")


def short_keys(data: bytes) -> ShortKeys:
    """`short_key` of each packed key. Raise ValueError when the length is no multiple of 16."""
    return ShortKeys(data)
