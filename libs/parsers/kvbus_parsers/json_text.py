"""JSON as text: how strings and numbers of a model are written down without a detour over Python values that would change them."""

import json
import math
import re
from json.encoder import encode_basestring
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
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
    """The value of a JSON text; ``ValueError`` where it is none by the letter, or holds a number beyond what Python reads."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def dumps(value: object) -> str:
    """What `loads` gives, as JSON text. A lone surrogate, which UTF-8 can not hold, is written as the escape that it was."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def string(text: str) -> str:
    """The string that a JSON string writes, lone surrogates replaced: text has to go out as UTF-8, which can not hold them."""
    return _SURROGATE.sub("\ufffd", str(json.loads(text)))


def is_json(text: str) -> bool:
    """Whether this is JSON by the letter, without a number beyond all floats. Integers may be of any length."""
    try:
        json.loads(text, parse_int=str, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return False
    return True


def keys(text: str) -> set[str] | None:
    """The keys of the JSON object that ``text`` is, with numbers of any size; ``None`` if it is none."""
    try:
        members = json.loads(text, parse_int=str, parse_float=str, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return set(members) if isinstance(members, dict) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
