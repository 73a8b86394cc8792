"""``POST /v1/prompt``: what a request's prompt is made of."""

from typing import Literal

import msgspec

PromptApi = Literal["chat", "responses", "messages"]


class PromptSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of the prompt. ``special``: it is one control token.

    ``start``, ``tokens``: its first token and how many begin in it; None where the tokenizer does not tell where in the text its
    tokens begin. ``source``: the field of the request that the text comes from, such as ``messages[4].content[0].text``. A tool or
    a call (``tools[3]``) stands for what the template writes of it between its texts. None: the template's own text, or text of
    which no field is known. ``offset``: characters of the field before this piece, where the piece is the field's own text;
    ``escaped``: as it stands within a JSON string.
    """

    text: str
    start: int | None = None
    tokens: int | None = None
    special: bool = False
    source: str | None = None
    offset: int | None = None
    escaped: bool = False


class PromptBlock(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole block. ``key``: in hexadecimal; ``char``: where in the prompt's text it begins, None where that is not known."""

    key: str
    char: int | None = None


class PromptRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that makes the prompt another than the request says. ``source``: the field it was applied to, where that is known;
    ``text``: what was taken away, or what was done."""

    rule: str
    source: str | None = None
    text: str = ""


class PromptView(msgspec.Struct, frozen=True, kw_only=True):
    """``domain``: hash of all that separates caches (model, layout, ``cache_salt``), in hexadecimal; ``salted``: there is a salt.

    ``tokens``, ``blocks``: as a worker is sent them. ``not_shown``: fields whose text is not in the prompt; empty when that could
    not be found out.
    """

    object: str = "prompt"
    api: PromptApi
    model: str
    served_model: str
    harness: str
    count: int
    max_model_len: int
    block_size: int
    domain: str
    salted: bool
    tokens: list[int]
    segments: list[PromptSegment]
    blocks: list[PromptBlock]
    rules: list[PromptRule]
    not_shown: list[str]
