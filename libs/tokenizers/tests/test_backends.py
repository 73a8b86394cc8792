"""One behaviour for every tokenizer library behind the Backend Protocol."""

import json
from array import array
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvbus_tokenizers import TextNotEncodable, TokenizerUnsupported
from kvbus_tokenizers.backends import Backend, FastBackend, HfBackend, load_backend

SPECIAL, MARKER = "<|end|>", "<tool>"
CORPUS = ["def f(x):\n    return x + 1  # naïve café 日本語 🎉\n", "Hello world, hello there.\n\n\n"] * 4


def trained() -> str:
    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    native.post_processor = processors.TemplateProcessing(single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, 0)])
    model = json.loads(native.to_str())
    model["added_tokens"].append(
        {**model["added_tokens"][0], "id": len(model["model"]["vocab"]), "content": MARKER, "special": False}
    )
    # Limits in the file are for training: prompts are never cut or padded.
    model["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    return json.dumps(model)


MODEL = trained()
MARKER_ID = int(json.loads(MODEL)["added_tokens"][-1]["id"])
BACKENDS: list[Callable[[str], Backend]] = [FastBackend, HfBackend]
PREPARED = {make: make(MODEL) for make in BACKENDS}
every_backend = pytest.mark.parametrize("make", BACKENDS)


@every_backend
def test_the_vocabulary_size_includes_added_tokens(make: Callable[[str], Backend]) -> None:
    assert make(MODEL).vocab_size == MARKER_ID + 1


@every_backend
def test_plain_text_matches_markers_but_no_special_tokens(make: Callable[[str], Backend]) -> None:
    special, marker = make(MODEL).encode_plain([f"a{SPECIAL}", f"a{MARKER}b"])
    assert 0 not in special
    assert MARKER_ID in marker


@every_backend
def test_literal_text_matches_nothing_at_all(make: Callable[[str], Backend]) -> None:
    ids = make(MODEL).encode_literal(f"{SPECIAL}{MARKER}")
    assert 0 not in ids
    assert MARKER_ID not in ids


@every_backend
@given(
    texts=st.lists(
        st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([SPECIAL, MARKER])), max_size=4
    )
)
@settings(deadline=None)
def test_packed_ids_are_the_same_ids(make: Callable[[str], Backend], texts: list[str]) -> None:
    backend = PREPARED[make]
    assert [array("I", packed).tolist() for packed in backend.encode_packed(texts)] == backend.encode_plain(texts)


@every_backend
def test_long_text_is_not_cut(make: Callable[[str], Backend]) -> None:
    [ids] = make(MODEL).encode_plain(["word " * 100])
    assert len(ids) > 100


@every_backend
def test_a_backend_that_gives_up_on_a_text_says_so_by_type(make: Callable[[str], Backend]) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    like_smollm2 = {**json.loads(MODEL), "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}}
    backend = make(json.dumps(like_smollm2))
    with suppress(TextNotEncodable):
        assert len(backend.encode_plain([" " * 1_000_000])[0]) > 1000
    with suppress(TextNotEncodable):
        assert len(backend.encode_packed([" " * 1_000_000])[0]) > 4000
    with suppress(TextNotEncodable):
        assert len(backend.encode_literal(" " * 1_000_000)) > 1000


def test_a_model_that_makes_the_library_panic_is_not_supported() -> None:
    broken = json.loads(MODEL)
    broken["model"]["continuing_subword_prefix"] = "##"
    with pytest.raises(TokenizerUnsupported):
        load_backend(json.dumps(broken), {})


@every_backend
def test_the_post_processor_is_told_apart_from_the_text(make: Callable[[str], Backend]) -> None:
    assert make(MODEL).affixes() == ([0], [])


@every_backend
def test_spellings_of_tokens_are_those_of_the_vocabulary(make: Callable[[str], Backend]) -> None:
    backend = make(MODEL)
    assert backend.id_to_token(0) == SPECIAL
    assert backend.id_to_token(10_000) is None


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None)
def test_all_backends_give_the_same_ids(text: str) -> None:
    fast, other = PREPARED.values()
    assert fast.encode_plain([text, text + MARKER]) == other.encode_plain([text, text + MARKER])
    assert fast.encode_literal(text) == other.encode_literal(text)
