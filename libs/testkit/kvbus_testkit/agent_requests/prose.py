"""Made-up text of a given length, the same for the same seed."""

import random
from typing import Any

_TEXT = (
    "agent answer before branch build change check code command commit directory edit error explain file function keep line list "
    "module name never note open option output path plan prefer project question read report result run search session short step "
    "task test text tool turn user value when write"
)
_WORDS = _TEXT.split()


def prose(seed: str, chars: int) -> str:
    """Sentences, ``chars`` characters of them."""
    source = random.Random(seed)
    text = ""
    while len(text) < chars:
        sentence = " ".join(source.choices(_WORDS, k=source.randint(5, 14)))
        text += sentence.capitalize() + (".\n" if source.random() < 0.2 else ". ")
    return text[: chars - 1] + "." if chars else ""


def schema(seed: str, parameters: int) -> dict[str, Any]:
    """A JSON Schema of an object with so many strings."""
    names = [f"{_WORDS[(i * 7 + len(seed)) % len(_WORDS)]}_{i}" for i in range(parameters)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {name: {"type": "string", "description": prose(f"{seed}.{name}", 60)} for name in names},
        "required": names[:1],
        "additionalProperties": False,
    }
