"""A model's text side without a model: a tokenizer with one token per byte and a ChatML template.

The mock engine serves it where no model directory is given, and tests use it as the smallest real bundle.
"""

import json
from typing import Any

from kvbus_tokenizers.bundle import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelBundle,
)
from kvbus_tokenizers.pieces import BYTE_ALPHABET

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = {END_OF_TEXT: 256, MESSAGE_START: 257, MESSAGE_END: 258}
CONTEXT_LENGTH = 32768

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def byte_level_bundle(*, context_length: int = CONTEXT_LENGTH, chat_template: str = _TEMPLATE) -> ModelBundle:
    """Token ids 0..255 are the bytes, the three ChatML tokens follow; ``<|im_end|>`` ends a turn."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(BYTE_ALPHABET.items(), key=lambda entry: entry[1])),
            "merges": [],
        },
    }
    eos = SPECIAL_TOKENS[MESSAGE_END]
    return ModelBundle(
        {
            TOKENIZER: _json(tokenizer),
            TOKENIZER_CONFIG: _json({"eos_token": MESSAGE_END, "pad_token": END_OF_TEXT}),
            CHAT_TEMPLATE: chat_template.encode(),
            GENERATION_CONFIG: _json({"eos_token_id": [eos, SPECIAL_TOKENS[END_OF_TEXT]]}),
            CONFIG: _json(
                {
                    "vocab_size": 256 + len(SPECIAL_TOKENS),
                    "max_position_embeddings": context_length,
                    "eos_token_id": eos,
                }
            ),
        }
    )


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
