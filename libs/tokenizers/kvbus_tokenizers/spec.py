"""What this package reads of a tokenizer.json and a tokenizer_config.json besides what the backends take from it themselves.

Decoding into these structs skips the vocabulary and merges (most of the file), so it needs little time and memory.
"""

from typing import Any

import msgspec

from kvbus_tokenizers.errors import TokenizerUnsupported


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is matched in text before any other rule. ``lstrip``/``rstrip``: it swallows white space beside it."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class DecoderStep(msgspec.Struct, frozen=True):
    """One decoder of the ``decoder`` entry; only the fields of the kinds that are understood."""

    type: str
    decoders: list["DecoderStep"] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = "\u2581"
    prepend_scheme: str = "always"
    add_prefix_space: bool | None = None


class PipelineStep(msgspec.Struct, frozen=True):
    """One normalizer or pre-tokenizer; only the fields of the kinds that are understood."""

    type: str
    normalizers: list["PipelineStep"] = []
    pretokenizers: list["PipelineStep"] = []
    pattern: dict[str, str] | str | None = None
    content: str = ""
    behavior: str = ""
    replacement: str = "\u2581"

    @property
    def steps(self) -> list["PipelineStep"]:
        """Of a sequence."""
        return [*self.normalizers, *self.pretokenizers]


class ModelSpec(msgspec.Struct, frozen=True):
    type: str = ""
    byte_fallback: bool | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TokenizerSpec(msgspec.Struct, frozen=True):
    added_tokens: list[AddedToken] = []
    normalizer: PipelineStep | None = None
    pre_tokenizer: PipelineStep | None = None
    model: ModelSpec = ModelSpec()
    decoder: DecoderStep | None = None


_spec_decoder = msgspec.json.Decoder(TokenizerSpec)


def read_spec(tokenizer_json: bytes) -> TokenizerSpec:
    """Raise TokenizerUnsupported when it is no tokenizer.json."""
    try:
        return _spec_decoder.decode(tokenizer_json)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerUnsupported(f"tokenizer.json is not readable: {error}") from error


def named_tokens(tokenizer_config: bytes | None) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ... of a tokenizer_config.json, as plain text (they may be objects with ``content``)."""
    if tokenizer_config is None:
        return {}
    try:
        config = msgspec.json.decode(tokenizer_config)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerUnsupported(f"tokenizer_config.json is not readable: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerUnsupported("tokenizer_config.json is no object")
    return {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
