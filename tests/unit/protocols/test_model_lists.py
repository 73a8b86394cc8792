"""Strict clients read the lists of models, whatever is known of a model."""

import msgspec
import pytest
from anthropic.types import ModelInfo
from openai.types import Model as OpenAIModel

from kvbus_protocols.models import ServedAs, anthropic_model, model_entry

EVERYTHING = ServedAs("hermes", "qwen3", ("low", "high", "max"), structured_outputs=True)


@pytest.mark.parametrize("served", [ServedAs(), EVERYTHING], ids=["nothing-known", "everything"])
def test_the_official_clients_read_every_field_they_know(served: ServedAs) -> None:
    model = model_entry("m", root="m", created=1, context_length=100, max_output_tokens=50, served=served)
    OpenAIModel.model_validate_json(msgspec.json.encode(model), strict=True)
    info = ModelInfo.model_validate_json(msgspec.json.encode(anthropic_model(model)), strict=True)
    assert (info.max_input_tokens, info.max_tokens) == (100, 50)
    assert info.capabilities is not None
    assert info.capabilities.thinking.types.disabled.supported
    assert info.capabilities.thinking.supported == (served.reasoning_parser is not None)
    assert info.capabilities.structured_outputs.supported == served.structured_outputs
    assert info.capabilities.effort.supported == bool(served.reasoning_efforts)


def test_what_is_not_known_is_left_out() -> None:
    model = model_entry("m", root="m", created=1, context_length=100, max_output_tokens=100, served=ServedAs())
    described = msgspec.to_builtins(model)
    assert described["kvbus"] == {}
    assert not {"tools", "reasoning", "reasoning_effort", "response_format"} & set(described["supported_parameters"])
