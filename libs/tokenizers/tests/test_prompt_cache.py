"""Whatever was cached before, and however little room there is: the tokens are those of plain tokenizing."""

import os
import threading
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvbus_tokenizers import (
    ModelBundle,
    PromptCache,
    Segment,
    Tokenizer,
    byte_level_bundle,
    load_template,
    load_tokenizer,
)
from kvbus_tokenizers.prompt_cache import ENTRY_BYTES, STEP_BYTES

REAL = [Path(folder) for folder in os.environ.get("TEST_TOKENIZER_FOLDERS", "").split(os.pathsep) if folder]
"""Folders with the tokenizer.json of real models, where a machine has some."""

CORPUS = ["def f(x): return x + 1\n\n  # the naïve café 日本語 🎉\n<|im| start end>"] * 3
START, END = Segment("<|im_start|>", 257), Segment("<|im_end|>", 258)


def trained(kind: str) -> Tokenizer:
    native = HfTokenizer(models.BPE(byte_fallback=kind == "sentencepiece", unk_token=None))
    if kind == "sentencepiece":
        native.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        native.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        native.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256) if kind == "sentencepiece")]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(CORPUS, trainer)
    return Tokenizer(native.to_str().encode())


LOADERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: Tokenizer.from_bundle(byte_level_bundle()),
    "byte-level": lambda: trained("byte-level"),
    "sentencepiece": lambda: trained("sentencepiece"),
    **{folder.name: lambda folder=folder: load_tokenizer(ModelBundle.from_directory(folder)) for folder in REAL},  # type: ignore[misc]
}


@pytest.fixture(scope="module", params=list(LOADERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return LOADERS[request.param]()


BYTES = LOADERS["bytes"]()

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(["<|im_start|>", "<|im_", "end|>", " ", "\n\n", "assistant\n", "x" * STEP_BYTES, "é" * 100]),
)
segments = st.builds(
    lambda text, kind: Segment(text, 257 + len(text) % 2) if kind == "control" else Segment(text, literal=kind == "l"),
    texts,
    st.sampled_from(["control", "control", "text", "text", "l"]),
)
prompts = st.lists(segments, max_size=12)


@st.composite
def families(draw: st.DrawFn) -> list[list[Segment]]:
    """Prompts that grow out of each other, and are edited in the middle."""
    family = [draw(prompts)]
    for _ in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from(family))
        kept = draw(st.integers(0, len(before)))
        skipped = draw(st.integers(kept, len(before))) if draw(st.booleans()) else len(before)
        family.append([*before[:kept], *draw(prompts), *before[skipped:]])
    return family


def ids(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def encode_all(cache: PromptCache, tokenizer: Tokenizer, family: Sequence[list[Segment]]) -> None:
    for prompt in family:
        encoded = cache.encode(tokenizer, prompt)
        assert ids(encoded.tokens) == tokenizer.encode_segments(prompt)
        assert encoded.count == (encoded.ends[-1] if encoded.ends else 0)
        cache.check_integrity()


@given(family=families(), limit_bytes=st.sampled_from([0, 300, 800, 2500, 1 << 20]))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_are_those_of_plain_tokenizing(
    tokenizer: Tokenizer, family: list[list[Segment]], limit_bytes: int
) -> None:
    encode_all(PromptCache(limit_bytes), tokenizer, family)


@given(
    family=families(),
    limit_bytes=st.sampled_from([0, 1000, 4000, 1 << 20]),
    labels=st.sets(st.binary(max_size=1), max_size=3),
)
@settings(deadline=None)
def test_what_is_attached_comes_back_for_the_same_beginning_only(
    family: list[list[Segment]], limit_bytes: int, labels: set[bytes]
) -> None:
    cache = PromptCache(limit_bytes)
    for prompt in family:
        encoded = cache.encode(BYTES, prompt)
        for label in labels:
            truth = [label + encoded.tokens[: 4 * end] for end in encoded.ends]
            found = cache.attached(encoded, label)
            assert found == truth[: len(found)]
            cache.attach(encoded, label, truth)
            cache.check_integrity()


def conversation(*contents: str) -> list[Segment]:
    return [
        item
        for i, text in enumerate(contents)
        for item in (START, Segment(f"{'user' if i % 2 else 'system'}\n{text}"), END, Segment("\n"))
    ]


SYSTEM = "You are an agent. " * 40


def test_a_system_prompt_is_found_under_every_conversation() -> None:
    cache = PromptCache(1 << 20)
    cache.encode(BYTES, conversation(SYSTEM, "first question " * 20))
    other = cache.encode(BYTES, conversation(SYSTEM, "second question " * 20))
    assert other.cached_tokens >= len(SYSTEM)
    again = cache.encode(BYTES, conversation(SYSTEM, "first question " * 20, "and more " * 20))
    assert again.cached_tokens >= len(SYSTEM) + 20 * len("first question ")


def test_a_grown_conversation_costs_its_tail() -> None:
    cache, turns = PromptCache(1 << 20), [SYSTEM]
    cache.encode(BYTES, conversation(*turns))
    for i in range(20):
        turns.append(f"turn {i} " * 40)
        before = cache.stats.encoded_tokens
        grown = cache.encode(BYTES, conversation(*turns))
        assert cache.stats.encoded_tokens - before < len(turns[-1]) + 40
        assert grown.cached_tokens > grown.count - len(turns[-1]) - 40


def test_an_edit_in_the_middle_keeps_what_is_before_it() -> None:
    cache = PromptCache(1 << 20)
    cache.encode(BYTES, conversation(SYSTEM, "a" * 500, "b" * 500, "c" * 500))
    edited = cache.encode(BYTES, conversation(SYSTEM, "a" * 500, "X" * 500, "c" * 500))
    assert len(SYSTEM) + 500 < edited.cached_tokens < len(SYSTEM) + 1000


def test_kinds_and_borders_of_segments_are_part_of_their_name() -> None:
    cache, long = PromptCache(1 << 20), "x" * STEP_BYTES
    names = [
        cache.encode(BYTES, prompt).names
        for prompt in (
            [Segment(long)],
            [Segment(long, literal=True)],
            [Segment(long[:5]), Segment(long[5:])],
            [Segment(long[:6]), Segment(long[6:])],
            [Segment(long), START],
            [Segment(long), END],
            [Segment(long + "c257:")],
            [Segment("", 257), Segment(long)],
        )
    ]
    assert len(set(names)) == len(names)


def test_tokenizers_share_nothing() -> None:
    cache, other = PromptCache(1 << 20), trained("byte-level")
    prompt = conversation(SYSTEM)
    cache.encode(BYTES, prompt)
    assert ids(cache.encode(other, prompt).tokens) == other.encode_segments(prompt)
    assert cache.encode(other, prompt).cached_tokens == len(other.encode_segments(prompt))


def test_the_end_of_a_chain_goes_before_its_beginning_and_the_unused_before_the_used() -> None:
    shared, step = SYSTEM, ENTRY_BYTES + 33 + 4 * 520
    cache = PromptCache(3 * (ENTRY_BYTES + 4 * 800) + 3 * step)
    cache.encode(BYTES, conversation(shared, "a" * 500, "b" * 500))
    for i in range(30):
        cache.encode(BYTES, conversation(shared, f"{i:03d}" * 170))
        cache.check_integrity()
    assert cache.stats.evictions > 20
    assert cache.encode(BYTES, conversation(shared, "new")).cached_tokens >= len(shared)
    assert cache.encode(BYTES, conversation(shared, "029" * 170)).cached_tokens > len(shared) + 500


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    cache = PromptCache(2 * (ENTRY_BYTES + 33 + 4 * 1100))
    prompt = conversation(*(chr(65 + i) * 1000 for i in range(10)))
    cache.encode(BYTES, prompt)
    cache.check_integrity()
    assert 1000 < cache.encode(BYTES, prompt).cached_tokens < 3000


def test_without_room_nothing_is_kept_and_nothing_fails() -> None:
    cache = PromptCache(0)
    for _ in range(2):
        encoded = cache.encode(BYTES, conversation(SYSTEM, "a"))
        cache.attach(encoded, b"label", [b""] * len(encoded.names))
        assert (encoded.cached_tokens, cache.stats.entries, cache.attached(encoded, b"label")) == (0, 0, [])


def test_text_that_cannot_be_encoded_is_refused_as_without_a_cache() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        PromptCache(1 << 20).encode(BYTES, [Segment("\ud800")])


def test_the_counted_bytes_are_the_real_ones() -> None:
    prompts = [conversation(*(f"{i} {j} " * 40 for j in range(10))) for i in range(100)]
    cache = PromptCache(64 << 20)
    cache.encode(BYTES, prompts[0])
    tracemalloc.start()
    try:
        before, counted_before = tracemalloc.get_traced_memory()[0], cache.stats.size_bytes
        for prompt in prompts[1:]:
            encoded = cache.encode(BYTES, prompt)
            cache.attach(encoded, b"l" * 32, [bytes(16 * n) for n in range(len(encoded.names))])
        del encoded
        grown, counted = tracemalloc.get_traced_memory()[0] - before, cache.stats.size_bytes - counted_before
    finally:
        tracemalloc.stop()
    assert counted * 0.85 < grown < counted * 1.05


def test_threads_may_share_a_cache() -> None:
    tokenizer = trained("byte-level")
    cache, failures = PromptCache(40_000), list[BaseException]()
    family = [conversation(SYSTEM, *(f"{i}-{j} " * 60 for j in range(i % 7))) for i in range(20)]

    def work(shift: int) -> None:
        try:
            for i in range(60):
                prompt = family[(i * (shift + 1)) % len(family)]
                encoded = cache.encode(tokenizer, prompt)
                assert ids(encoded.tokens) == tokenizer.encode_segments(prompt)
                keys = [encoded.tokens[: 4 * end] for end in encoded.ends]
                found = cache.attached(encoded, b"k")
                assert found == keys[: len(found)]
                cache.attach(encoded, b"k", keys)
        except BaseException as failure:  # whatever it is, the test must see it
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.check_integrity()
    assert cache.stats.hits
    assert cache.stats.evictions


@pytest.mark.parametrize("folder", REAL, ids=lambda folder: folder.name)
def test_conversations_of_real_models_are_the_same_with_and_without_a_cache(folder: Path) -> None:
    bundle = ModelBundle.from_directory(folder)
    tokenizer = load_tokenizer(bundle)
    template, cache = load_template(bundle, tokenizer), PromptCache(1 << 20)
    assert template is not None
    messages = [{"role": "system", "content": Path(__file__).read_text()}]
    for i in range(20):
        messages.append({"role": "user", "content": f" {i}\n\n" + Path(__file__).read_text()[i * 100 : i * 150]})
        messages.append({"role": "assistant", "content": f"\nfine <|im_end|> {i}é日本"})
        prompt = template.render(messages)
        assert ids(cache.encode(tokenizer, prompt).tokens) == tokenizer.encode_segments(prompt)
    assert cache.stats.cached_tokens > cache.stats.encoded_tokens
