"""A prompt that would fit is never called too long."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvbus_tokenizers import Segment, Tokenizer, byte_level_bundle
from kvbus_tokenizers.length_bound import NFC_SHRINKS, NFC_TO_ASCII

CORPUS = ["def f(x): return x + 1\n\n  # the naïve café 日本語 🎉 한국어\n" + " " * 64 + "=" * 70 + "\u0390\u1f82"] * 3
MARKER = "<tool_call>"


def trained(kind: str, **changes: Any) -> Tokenizer:
    sentencepiece = kind == "sentencepiece"
    native = HfTokenizer(models.BPE(byte_fallback=sentencepiece))
    if sentencepiece:
        native.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        native.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        native.normalizer = normalizers.NFC() if kind == "nfc" else None
        native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        native.decoder = decoders.ByteLevel()
    # Without its whole alphabet, as some models are: bytes that have no token are lost.
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "holes" else ["a"]
    special = ["<|end|>", *(f"<0x{byte:02X}>" for byte in range(256) if sentencepiece)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    model = json.loads(native.to_str())
    model["added_tokens"] = [token for token in model["added_tokens"] if token["content"] == "<|end|>"]
    marker = {**model["added_tokens"][0], "id": len(model["model"]["vocab"]), "content": MARKER, "special": False}
    model["added_tokens"].append(marker | changes.pop("marker", {}))
    model["model"] |= changes.pop("model", {})
    return Tokenizer(json.dumps(model | changes).encode())


TOKENIZERS = {
    "bytes": Tokenizer.from_bundle(byte_level_bundle()),
    **{kind: trained(kind) for kind in ("plain", "nfc", "holes", "sentencepiece")},
}

texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        st.builds(
            lambda text, times: text * times,
            st.sampled_from(
                [" ", "=", "\u1fbe\u0308\u0301", "\u1112\u1175\u11c2", "\u212a", "e\u0301", MARKER, "日本", "\u2581"]
            ),
            st.integers(1, 200),
        ),
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(text=texts, literal=st.booleans())
@settings(deadline=None)
def test_a_text_has_at_least_so_many_tokens(name: str, text: str, literal: bool) -> None:
    segments = [Segment("", 0), Segment(text, literal=literal)]
    tokenizer = TOKENIZERS[name]
    assert tokenizer.least_tokens(segments, enough=1 << 60) <= len(tokenizer.encode_segments(segments))


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "holes"])
def test_ordinary_text_is_not_taken_for_much_shorter_than_it_is(name: str) -> None:
    segments = [Segment("def g(y):\n    return y * 2  # twice\n" * 100)]
    real = len(TOKENIZERS[name].encode_segments(segments))
    assert real / 40 < TOKENIZERS[name].least_tokens(segments, enough=1 << 60) <= real


def test_no_more_is_looked_at_than_is_enough() -> None:
    text = "x" * (5 << 20)
    assert 1000 < TOKENIZERS["bytes"].least_tokens([Segment(text)] * 1000, enough=1000) <= 1 << 20


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 5])
@pytest.mark.parametrize("tail", ["", "\u0301", "日"])
def test_long_texts_are_looked_at_in_pieces(size: int, tail: str) -> None:
    segments = [Segment("a" * size + tail)]
    least = TOKENIZERS["nfc"].least_tokens(segments, enough=1 << 60)
    assert size / 300 < least <= len(TOKENIZERS["nfc"].encode_segments(segments))


def test_control_tokens_count_one_each_whatever_they_spell() -> None:
    assert TOKENIZERS["plain"].least_tokens([Segment("<|end|>" + " " * 9999, 0)] * 7, enough=100) == 6  # rounded down
    assert TOKENIZERS["plain"].least_tokens([Segment("<|end|>", 0)] * 200, enough=100) > 99


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
        {"marker": {"lstrip": True}},
        {"model": {"end_of_word_suffix": "~"}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_lose_text_allows_no_statement(changes: dict[str, Any]) -> None:
    assert trained("plain", **changes).least_tokens([Segment("x" * 10_000)], enough=1 << 60) == 0


def test_a_byte_fallback_with_holes_allows_no_statement() -> None:
    model = json.loads(byte_level_bundle().files["tokenizer.json"])
    model |= {"pre_tokenizer": None, "decoder": {"type": "ByteFallback"}}
    model["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    model["model"] |= {"byte_fallback": True, "vocab": {"a": 0, "<0x62>": 1}}
    assert Tokenizer(json.dumps(model).encode()).least_tokens([Segment("x" * 10_000)], enough=1 << 60) == 0


def test_normalization_form_c_shortens_no_text_more_than_it_is_said_to() -> None:
    """Text before and after have the same full decomposition, so it is enough to look at that of each character: its largest share
    of the bytes of anything that decomposes to it, against the bytes of what it may be composed to."""
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    apart = {c: unicodedata.normalize("NFD", c) for c in characters}
    share: dict[str, float] = {}
    for c, decomposed in apart.items():
        for one in decomposed:
            share[one] = max(share.get(one, 0.0), len(c.encode()) / len(decomposed))
    composed = (c for c in characters if unicodedata.normalize("NFC", c) == c)
    worst = max(sum(share[one] for one in apart[c]) / len(c.encode()) for c in composed)
    assert worst <= NFC_SHRINKS
    assert "".join(c for c in characters[128:] if unicodedata.normalize("NFC", c).isascii()) == NFC_TO_ASCII
    assert unicodedata.normalize("NFC", NFC_TO_ASCII) == ";`K"
    assert all(len(decomposed) == 1 or not decomposed[1].isascii() for decomposed in apart.values())
