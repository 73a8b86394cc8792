"""Tokens and block keys of a prompt do not depend on what the cache has seen, or has room for."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_cli.paths import models_dir
from kvbus_frontend.core.prompt import prompt_of
from kvbus_tokenizers import (
    ChatTemplate,
    ModelBundle,
    PromptCache,
    Tokenizer,
    byte_level_bundle,
    load_template,
    load_tokenizer,
)
from kvbus_wire.packing import pack_keys, pack_tokens
from kvbus_wire.records import ModelCard
from kvbus_worker.models import smollm2

BUNDLES: dict[str, Callable[[], ModelBundle]] = {"bytes": byte_level_bundle}
if smollm2.folder(models_dir()).is_dir():
    BUNDLES["smollm2"] = lambda: ModelBundle.from_directory(smollm2.folder(models_dir()))

contents = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(
        ["You are an agent.\n" * 30, "<|im_end|>\n<|im_start|>", " \n" * 100, "def f(x):\n    return x\n" * 20]
    ),
)
conversations = st.lists(contents, min_size=1, max_size=5)
steps = st.tuples(
    st.integers(0, 5), st.integers(0, 5), conversations, st.sampled_from([1, 4, 16]), st.sampled_from(["", "t"])
)


@pytest.fixture(scope="module", params=list(BUNDLES))
def text_side(request: pytest.FixtureRequest) -> tuple[Tokenizer, ChatTemplate]:
    bundle = BUNDLES[request.param]()
    tokenizer = load_tokenizer(bundle)
    template = load_template(bundle, tokenizer)
    assert template is not None
    return tokenizer, template


@given(first=conversations, edits=st.lists(steps, max_size=6), limit_bytes=st.sampled_from([0, 600, 3000, 1 << 20]))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_and_keys_are_those_of_a_new_prompt(
    text_side: tuple[Tokenizer, ChatTemplate],
    first: list[str],
    edits: list[tuple[int, int, list[str], int, str]],
    limit_bytes: int,
) -> None:
    tokenizer, template = text_side
    cache, turns = PromptCache(limit_bytes), first
    for kept, skipped, new, block_size, salt in [(9, 0, [], 4, ""), *edits]:
        turns = [*turns[:kept], *new, *turns[kept + skipped :]]
        segments = template.render([{"role": "user", "content": text} for text in turns])
        card = ModelCard(name="m", fingerprint="f", block_size=block_size, context_length=1, bundle="b", kv_layout="l")
        for _ in range(2):
            prompt = prompt_of(cache.encode(tokenizer, segments), cache, card, salt=salt)
            tokens = pack_tokens(tokenizer.encode_segments(segments))
            domain = CacheDomain(model_fingerprint="f", block_size=block_size, kv_layout="l", salt=salt)
            assert prompt.tokens == tokens
            assert prompt.keys == pack_keys(chain_keys(domain.key(), tokens, block_size))
            assert prompt.extended([1, 2, 3]).tokens == tokens + pack_tokens([1, 2, 3])
            cache.check_integrity()


def test_a_repeated_prompt_is_found_whole() -> None:
    bundle = byte_level_bundle()
    tokenizer = load_tokenizer(bundle)
    template, cache = load_template(bundle, tokenizer), PromptCache(1 << 20)
    assert template is not None
    card = ModelCard(name="m", fingerprint="f", block_size=16, context_length=1, bundle="b", kv_layout="l")
    segments = template.render([{"role": "user", "content": f"{i} " * 100} for i in range(10)])
    first = prompt_of(cache.encode(tokenizer, segments), cache, card)
    seen = cache.encode(tokenizer, segments)
    assert seen.cached_tokens == seen.count
    assert len(cache.attached(seen, first.domain_key)) == len(seen.names)
    assert prompt_of(seen, cache, card) == first
