"""The generation_config.json of a model: its sampling defaults and end tokens."""

import msgspec

from kvbus_tokenizers.bundle import CONFIG, GENERATION_CONFIG, ModelBundle
from kvbus_tokenizers.errors import BundleInvalid


class GenerationConfig(msgspec.Struct, frozen=True):
    """Only what is set; None leaves the choice to the server. (``do_sample`` is not read, as in other servers.)"""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: int | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)


_decoder = msgspec.json.Decoder(GenerationConfig)


def read_generation_config(bundle: ModelBundle) -> GenerationConfig:
    """From generation_config.json; end tokens from config.json where that says none. Raise BundleInvalid for unreadable files."""
    try:
        config = _decoder.decode(bundle.files.get(GENERATION_CONFIG, b"{}"))
        if config.eos_token_id is None and CONFIG in bundle.files:
            fallback = _decoder.decode(bundle.files[CONFIG])
            config = msgspec.structs.replace(config, eos_token_id=fallback.eos_token_id)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleInvalid(f"the generation config is not readable: {error}") from error
    return config
