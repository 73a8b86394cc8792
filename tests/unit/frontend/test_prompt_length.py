"""A text that cannot fit into the context is refused before anything is done with it, and only such a text."""

from typing import cast

import pytest

from kvbus_frontend.core.prompt import CHECKED_CHARS, encoded_prompt
from kvbus_protocols import InvalidRequest
from kvbus_tokenizers import PromptCache, Segment, Tokenizer, byte_level_bundle

TOKENIZER = Tokenizer.from_bundle(byte_level_bundle())
LONG = [Segment("<|im_start|>", 257), Segment("x" * CHECKED_CHARS * 4), Segment("<|im_end|>", 258)]


class NeverTokenizes:
    def __init__(self) -> None:
        self.least_tokens = TOKENIZER.least_tokens


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    cache = PromptCache(1 << 30)
    with pytest.raises(InvalidRequest) as refusal:
        encoded_prompt(LONG, cast("Tokenizer", NeverTokenizes()), cache, context_length=1000, param="messages")
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert cache.stats.entries == 0


def test_a_text_that_may_fit_is_tokenized() -> None:
    whole = TOKENIZER.encode_segments(LONG)
    cache = PromptCache(1 << 30)
    encoded = encoded_prompt(LONG, TOKENIZER, cache, context_length=len(whole), param="messages")
    assert encoded.count == len(whole)
    assert cache.stats.entries


def test_a_prompt_that_turns_out_too_long_does_not_push_others_out_of_the_cache() -> None:
    cache = PromptCache(1 << 30)
    segments = [Segment("x" * 5000)]
    assert encoded_prompt(segments, TOKENIZER, cache, context_length=4999, param="messages").count == 5000
    assert cache.stats.entries == 0
