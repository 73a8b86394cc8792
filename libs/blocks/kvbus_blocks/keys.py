"""Block identity: 128-bit keys that name a block by all tokens up to its end and by the cache domain.

    domain_key = BLAKE2b-256(canonical form of the cache domain)
    key[i]     = BLAKE2b-128(key=domain_key, parent key[i-1] || tokens of block i as little-endian u32)

The chain starts below the empty parent. Two requests share a block exactly when their domain and all tokens up to the end of the
block are equal; tenants with different salts share nothing.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

import msgspec

KEY_BYTES = 16
ROOT = b""
_TOKEN_BYTES = 4
_PERSON = b"kvbus.block.v1"


class CacheDomain(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the tokens that must be equal for two blocks to hold the same data."""

    model_fingerprint: str
    block_size: int
    kv_layout: str
    lora: str = ""
    salt: str = ""

    def key(self) -> bytes:
        """The 32-byte key that seeds every block key of this domain."""
        fields = (self.model_fingerprint, self.block_size, self.kv_layout, self.lora, self.salt)
        return blake2b(msgspec.msgpack.encode(fields), digest_size=32, person=_PERSON).digest()


def chain_keys(domain_key: bytes, tokens: bytes | memoryview, block_size: int, parent: bytes = ROOT) -> list[bytes]:
    """Keys of the whole blocks in ``tokens`` (packed little-endian u32) below ``parent``; a partial last block has no key."""
    size = block_size * _TOKEN_BYTES
    seeded = blake2b(digest_size=KEY_BYTES, key=domain_key, person=_PERSON)  # copies of it cost half of new ones
    keys: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        state = seeded.copy()
        state.update(parent + tokens[end - size : end])
        parent = state.digest()
        keys.append(parent)
    return keys


class ShortKeys(Sequence[int]):
    """The low 64 bits of each of the packed keys, on which indexes route, read where they lie: making it costs nothing.

    Raise ValueError when the length is no multiple of 16.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        if len(packed) % KEY_BYTES:
            raise ValueError(f"{len(packed)} bytes are no multiple of the key size {KEY_BYTES}")
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._words()[index]
        start = range(0, len(self.packed), KEY_BYTES)[index]
        return int.from_bytes(self.packed[start : start + KEY_BYTES // 2], "little")

    def __iter__(self) -> Iterator[int]:
        return iter(self._words())

    def _words(self) -> "array[int]":
        words = array("Q", self.packed)
        if sys.byteorder == "big":
            words.byteswap()
        return words[::2]
