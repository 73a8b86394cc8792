"""Tokenizing and detokenizing for both families of decoders and both backends."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvbus_tokenizers import Segment, Tokenizer, TokenizerUnsupported, byte_level_bundle, load_tokenizer
from kvbus_tokenizers.backends import HfBackend

CORPUS = ["Hello world, hello there. The quick brown fox jumps over the lazy dog."] * 4
BYTES = load_tokenizer(byte_level_bundle())


def sentencepiece_json(*, strips: bool = True) -> bytes:
    """Llama 2's kind: spaces are U+2581, unknown characters are bytes, decoding drops the first space."""
    native = HfTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    native.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    native.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    native.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model = json.loads(native.to_str())
    # Byte tokens are ordinary vocabulary in such models; the trainer only takes them as special ones.
    model["added_tokens"] = [token for token in model["added_tokens"] if token["id"] < 3]
    return json.dumps(model).encode()


SENTENCES = Tokenizer(sentencepiece_json(), b'{"bos_token": "<s>"}')


def unigram_json() -> bytes:
    native = HfTokenizer(
        models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0), ("\u2581b", -2.5), ("c", -3.0)], 0, False)
    )
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Metaspace()
    native.add_special_tokens(["<end>"])
    return native.to_str().encode()


def test_bpe_models_are_read_by_the_fast_backend_and_others_by_the_other() -> None:
    assert BYTES.backend_name == "fastokens"
    assert Tokenizer(unigram_json()).backend_name == "tokenizers"


def test_the_vocabulary_includes_added_tokens() -> None:
    assert BYTES.vocab_size == 259
    assert Tokenizer(unigram_json()).vocab_size == 6


@pytest.mark.parametrize("text", ["", "hello", " a  b\n\n", "é日本🎉", "\x00\x7f"])
def test_text_comes_back_from_its_tokens(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text
    assert SENTENCES.decode(SENTENCES.encode(text)) == text


def test_special_tokens_in_text_count_only_when_allowed() -> None:
    assert BYTES.encode("<|im_end|>", allow_special=True) == [258]
    assert BYTES.encode("<|im_end|>") == list(b"<|im_end|>")
    unigram = Tokenizer(unigram_json())
    assert unigram.encode("<end>", allow_special=True) == [5]
    assert 5 not in unigram.encode("<end>")


def test_a_whole_text_gets_what_the_model_wants_around_it() -> None:
    assert SENTENCES.encode("hello", add_affixes=True) == [1, *SENTENCES.encode("hello")]
    assert BYTES.encode("hello", add_affixes=True) == BYTES.encode("hello")


def test_literal_segments_match_no_added_token_on_either_backend() -> None:
    model = json.loads(byte_level_bundle().files["tokenizer.json"])
    model["added_tokens"].append({**model["added_tokens"][0], "id": 259, "content": "<x>", "special": False})
    data = json.dumps(model)
    both = Tokenizer(data.encode())
    assert both.encode_segments([Segment("<x>"), Segment("<x>", literal=True)]) == [259, *b"<x>"]
    assert HfBackend(data).encode_literal("<x>") == list(b"<x>")
    assert HfBackend(data).encode_plain(["<x>", "<|im_end|>"]) == [[259], list(b"<|im_end|>")]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        BYTES.encode("\ud800")


def test_a_character_over_several_tokens_comes_out_when_it_is_complete() -> None:
    detokenizer = BYTES.detokenizer()
    pieces = [detokenizer.push([byte]) for byte in "a🎉b".encode()]
    assert pieces == ["a", "", "", "", "🎉", "b"]
    assert not detokenizer.has_pending


def test_a_character_that_is_never_completed_is_not_lost() -> None:
    detokenizer = BYTES.detokenizer()
    assert detokenizer.push("🎉".encode()[:3]) == ""
    assert detokenizer.has_pending
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert BYTES.decode([0xFF, 0x41, 0xC3, 0x41]) == "\ufffdA\ufffdA"


def test_special_tokens_have_text_only_when_it_is_kept() -> None:
    assert BYTES.decode([65, 258, 66]) == "AB"
    assert BYTES.decode([65, 258, 66], keep_special=True) == "A<|im_end|>B"


def test_ids_outside_of_the_vocabulary_have_no_text() -> None:
    assert BYTES.decode([65, 999_999, 66]) == "AB"


def test_a_leading_space_is_dropped_at_the_start_of_the_text_only() -> None:
    prompt = SENTENCES.encode("hello", add_affixes=True)
    words = SENTENCES.encode("world")
    assert SENTENCES.token_bytes(words[0]).startswith(b" ")
    assert SENTENCES.decode(words) == "world"
    after = SENTENCES.detokenizer(prompt=prompt)
    assert after.push(words) + after.finish() == " world"
    after_special = SENTENCES.detokenizer(prompt=[1])
    assert after_special.push(words) + after_special.finish() == "world"


def test_a_decoder_without_strip_keeps_the_leading_space() -> None:
    kept = Tokenizer(sentencepiece_json(strips=False))
    assert kept.decode(kept.encode("world")) == " world"


def test_byte_tokens_of_the_sentencepiece_kind_join_to_characters() -> None:
    ids = SENTENCES.encode("é")
    detokenizer = SENTENCES.detokenizer()
    assert [detokenizer.push([i]) for i in ids][-2:] == ["", "é"]


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"model":{"type":"BPE"}}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(TokenizerUnsupported):
        Tokenizer(data)


def test_a_decoder_that_needs_more_than_the_token_is_refused() -> None:
    model = json.loads(byte_level_bundle().files["tokenizer.json"])
    model["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(TokenizerUnsupported, match="WordPiece"):
        Tokenizer(json.dumps(model).encode())
