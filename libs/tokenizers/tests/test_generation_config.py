"""Sampling defaults and end tokens of a model."""

import json

import pytest

from kvbus_tokenizers import BundleInvalid, ModelBundle, TokenizerUnsupported, read_generation_config
from kvbus_tokenizers.spec import named_tokens


def bundle(**files: object) -> ModelBundle:
    return ModelBundle(
        {"tokenizer.json": b"{}", **{f"{name}.json": json.dumps(v).encode() for name, v in files.items()}}
    )


def test_only_what_is_set_is_a_default() -> None:
    config = read_generation_config(
        bundle(generation_config={"temperature": 0.6, "do_sample": True, "eos_token_id": [1, 2]})
    )
    assert (config.temperature, config.top_p, config.eos_token_ids) == (0.6, None, (1, 2))


def test_end_tokens_come_from_the_model_config_where_the_generation_config_says_none() -> None:
    assert read_generation_config(bundle(config={"eos_token_id": 7})).eos_token_ids == (7,)
    assert read_generation_config(bundle(generation_config={}, config={})).eos_token_ids == ()
    assert read_generation_config(bundle()).eos_token_ids == ()


@pytest.mark.parametrize("config", [[], {"temperature": "hot"}, {"eos_token_id": "x"}])
def test_an_unreadable_config_is_refused(config: object) -> None:
    with pytest.raises(BundleInvalid):
        read_generation_config(bundle(generation_config=config))


def test_named_tokens_may_be_text_or_objects() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "model_max_length": 5}
    assert named_tokens(json.dumps(config).encode()) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert named_tokens(None) == {}


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff"])
def test_an_unreadable_tokenizer_config_is_refused(data: bytes) -> None:
    with pytest.raises(TokenizerUnsupported):
        named_tokens(data)
