"""A model's text side: bundles, tokenizing, chat templates, incremental detokenizing. Standalone, and light to import."""

from kvbus_tokenizers.bundle import ModelBundle, bundle_name, pack_bundle, unpack_bundle
from kvbus_tokenizers.bytelevel import byte_level_bundle
from kvbus_tokenizers.control import ControlTokens, Segment
from kvbus_tokenizers.detokenizer import Detokenizer
from kvbus_tokenizers.errors import (
    BundleInvalid,
    TemplateFailed,
    TextNotEncodable,
    TokenizerError,
    TokenizerUnsupported,
)
from kvbus_tokenizers.generation import GenerationConfig, read_generation_config
from kvbus_tokenizers.prompt_cache import CacheStats, EncodedPrompt, PromptCache, step_ends
from kvbus_tokenizers.template import ChatTemplate, load_template
from kvbus_tokenizers.tokenizer import Tokenizer, load_tokenizer
from kvbus_tokenizers.written import WrittenObject, WrittenValue

__all__ = [
    "BundleInvalid",
    "CacheStats",
    "ChatTemplate",
    "ControlTokens",
    "Detokenizer",
    "EncodedPrompt",
    "GenerationConfig",
    "ModelBundle",
    "PromptCache",
    "Segment",
    "TemplateFailed",
    "TextNotEncodable",
    "Tokenizer",
    "TokenizerError",
    "TokenizerUnsupported",
    "WrittenObject",
    "WrittenValue",
    "bundle_name",
    "byte_level_bundle",
    "load_template",
    "load_tokenizer",
    "pack_bundle",
    "read_generation_config",
    "step_ends",
    "unpack_bundle",
]
