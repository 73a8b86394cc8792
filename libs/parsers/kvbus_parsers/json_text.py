"""JSON as text: how strings and numbers of a model are written down without a detour over Python values that would change them."""

import json
import math
import re
from json.encoder import encode_basestring
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def quote(text: str) -> str:
    """``text`` as a JSON string."""
    return encode_basestring(text)


def escape(text: str) -> str:
    """``text`` as it stands inside a JSON string. Pieces may be escaped one by one and joined."""
    return encode_basestring(text)[1:-1]


def integer(text: str) -> str | None:
    """The JSON integer that ``text`` writes (a plus sign and leading zeros go), all digits kept; ``None`` if it writes none."""
    if not _INTEGER.fullmatch(text):
        return None
    # As text all the way: int() refuses very long numbers.
    digits = text.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits


def number(text: str) -> str | None:
    """The JSON number that ``text`` writes, its digits kept where JSON allows them; ``None`` if it writes no finite one."""
    if not _NUMBER.fullmatch(text):
        return None
    if whole := integer(text):
        return whole
    value = float(text)
    if not math.isfinite(value):
        return None
    return text if _JSON_NUMBER.fullmatch(text) else repr(value)


def loads(text: str) -> Any:
    """The value of a JSON text; ``ValueError`` where it is none by the letter, or holds a number beyond all floats."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def is_json(text: str) -> bool:
    try:
        loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
