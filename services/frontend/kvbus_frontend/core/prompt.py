"""A prompt as the rest of the system sees it: packed token ids and block keys."""

from collections.abc import Sequence

import msgspec

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_wire.packing import TOKEN_BYTES, pack_tokens
from kvbus_wire.records import ModelCard


class Prompt(msgspec.Struct, frozen=True):
    """``tokens``: packed u32; ``keys``: of its whole blocks; ``domain_key`` seeds them."""

    tokens: bytes
    keys: tuple[bytes, ...]
    domain_key: bytes
    block_size: int

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def extended(self, output: Sequence[int]) -> "Prompt":
        """With output tokens after it; the keys of the blocks that were whole already are kept."""
        if not output:
            return self
        tokens = self.tokens + pack_tokens(output)
        done = len(self.keys) * self.block_size * TOKEN_BYTES
        parent = self.keys[-1] if self.keys else b""
        more = chain_keys(self.domain_key, memoryview(tokens)[done:], self.block_size, parent)
        return msgspec.structs.replace(self, tokens=tokens, keys=(*self.keys, *more))


def prompt_of(token_ids: Sequence[int], card: ModelCard, *, salt: str = "") -> Prompt:
    domain = CacheDomain(
        model_fingerprint=card.fingerprint, block_size=card.block_size, kv_layout=card.kv_layout, salt=salt
    )
    domain_key, tokens = domain.key(), pack_tokens(token_ids)
    keys = chain_keys(domain_key, tokens, card.block_size)
    return Prompt(tokens, tuple(keys), domain_key, card.block_size)
