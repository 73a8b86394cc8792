"""A prompt as the rest of the system sees it: packed token ids and block keys. What the prompt cache knows is not made again."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvbus_blocks.keys import KEY_BYTES, CacheDomain, chain_keys
from kvbus_frontend.core.prompt_places import PromptText
from kvbus_protocols.errors import context_length_exceeded
from kvbus_tokenizers import EncodedPrompt, PromptCache, Segment, Tokenizer, step_ends
from kvbus_wire.packing import TOKEN_BYTES, pack_tokens, unpack_tokens
from kvbus_wire.records import ModelCard

CHECKED_CHARS = 1 << 20
"""A longer text is not tokenized before it is known that it may fit. Tokenizing a shorter one takes no longer than to find out."""


class Prompt(msgspec.Struct, frozen=True):
    """``tokens``: packed u32; ``keys``: of its whole blocks, packed; ``domain_key`` seeds them."""

    tokens: bytes
    keys: bytes
    domain_key: bytes
    block_size: int

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def token_ids(self) -> list[int]:
        return unpack_tokens(self.tokens)

    @property
    def blocks(self) -> int:
        """How many whole ones."""
        return len(self.keys) // KEY_BYTES

    def prefix_key(self, blocks: int) -> bytes:
        """Names the first blocks; empty for none."""
        return self.keys[: blocks * KEY_BYTES][-KEY_BYTES:]

    def extended(self, output: Sequence[int]) -> "Prompt":
        """With output tokens after it; the keys of the blocks that were whole already are kept."""
        if not output:
            return self
        tokens = self.tokens + pack_tokens(output)
        keys = self.keys + _more_keys(tokens, self.keys, self.domain_key, self.block_size)
        return msgspec.structs.replace(self, tokens=tokens, keys=keys)


def given_prompt(token_ids: Sequence[int]) -> EncodedPrompt:
    """Tokens that the client has made itself; the cache knows nothing of them."""
    return EncodedPrompt(pack_tokens(token_ids), (), (), 0)


def encoded_prompt(
    segments: Sequence[Segment], tokenizer: Tokenizer, cache: PromptCache, *, context_length: int, param: str
) -> EncodedPrompt:
    """The tokens of a rendered prompt. One that cannot fit is not kept, and at best not even tokenized. Raise ApiError."""
    check_length(segments, tokenizer, context_length=context_length, param=param)
    return cache.encode(tokenizer, segments, keep_up_to=context_length)


class TokenCounts:
    """How many tokens of a prompt lie before a place in its text. Little is tokenized again: what lies between the place and the
    end of the step before it."""

    def __init__(
        self,
        text: PromptText,
        segments: Sequence[Segment],
        encoded: EncodedPrompt,
        tokenizer: Tokenizer,
        cache: PromptCache,
    ) -> None:
        self._text = text
        self._segments = segments
        self._encoded = encoded
        self._tokenizer = tokenizer
        self._cache = cache
        self._steps = step_ends(segments)

    def before(self, position: int) -> int:
        """Tokens that hold nothing of what stands behind the character ``position``."""
        whole = self._text.whole_segments(position)
        count = self._whole(whole)
        if whole == len(self._segments) or position <= self._text.starts[whole]:
            return count
        cut = self._segments[whole]
        if cut.token_id is not None:
            return count
        part = replace(cut, text=cut.text[: position - self._text.starts[whole]])
        return count + common_bytes(self._tokens([part]), self._encoded.tokens[count * TOKEN_BYTES :]) // TOKEN_BYTES

    def _whole(self, segments: int) -> int:
        """Of so many leading segments."""
        steps = bisect_right(self._steps, segments)
        count, done = (self._encoded.ends[steps - 1], self._steps[steps - 1]) if steps else (0, 0)
        rest = self._segments[done:segments]
        return count + (len(self._tokens(rest)) // TOKEN_BYTES if rest else 0)

    def _tokens(self, segments: Sequence[Segment]) -> bytes:
        """Also these come again: with each request of a conversation."""
        return self._cache.encode(self._tokenizer, segments, counts=False).tokens


def common_bytes(a: bytes, b: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def prompt_of(encoded: EncodedPrompt, cache: PromptCache, card: ModelCard, *, salt: str = "") -> Prompt:
    """With its block keys, which stand beside the tokens in the cache: per step those of the blocks that end in it."""
    domain_key, size = _domain_key(card, salt), card.block_size
    known = cache.attached(encoded, domain_key)
    keys = b"".join(known)
    keys += _more_keys(encoded.tokens, keys, domain_key, size)
    if len(known) < len(encoded.ends):
        ends = [end // size * KEY_BYTES for end in encoded.ends]
        cache.attach(encoded, domain_key, [keys[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    return Prompt(encoded.tokens, keys, domain_key, size)


def check_length(segments: Sequence[Segment], tokenizer: Tokenizer, *, context_length: int, param: str) -> None:
    """Raise InvalidRequest for text that certainly has more tokens than the context, without the seconds that tokenizing takes."""
    if sum(len(segment.text) for segment in segments) < CHECKED_CHARS:
        return
    least = tokenizer.least_tokens(segments, enough=context_length)
    if least > context_length:
        raise context_length_exceeded(limit=context_length, prompt_tokens=least, completion_tokens=1, param=param)


def _domain_key(card: ModelCard, salt: str) -> bytes:
    return CacheDomain(
        model_fingerprint=card.fingerprint, block_size=card.block_size, kv_layout=card.kv_layout, salt=salt
    ).key()


def _more_keys(tokens: bytes, keys: bytes, domain_key: bytes, block_size: int) -> bytes:
    """The keys that follow these."""
    done = len(keys) // KEY_BYTES * block_size * TOKEN_BYTES
    return b"".join(chain_keys(domain_key, memoryview(tokens)[done:], block_size, keys[-KEY_BYTES:]))
