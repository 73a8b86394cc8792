"""Writing tokenizer.json and its companions for byte-level BPE vocabularies."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    *,
    split_digits: bool,
) -> Tokenizer:
    """A GPT-2 style tokenizer; ``special`` tokens must be in the vocabulary. ``split_digits``: each digit is a word of its own."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [pre_tokenizers.Digits(individual_digits=True), byte_level] if split_digits else [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    chat_template: str,
    bos: str | None,
    eos: str,
    pad: str,
    unknown: str | None,
) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja (the config holds the template, too, for older readers)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "chat_template": chat_template,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
