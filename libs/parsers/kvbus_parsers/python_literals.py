"""Python literals as JSON text: what a model writes that answers a request for JSON with ``{'a': True}``.

The text is translated token by token and never compiled: the compiler warns about stray backslashes of a model, and deep nesting is
known to take it down. Whether the result is JSON as a whole is for a JSON reader to say.
"""

import re

from kvbus_parsers.json_text import number, quote

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string> "[^"\\]*+(?:\\.[^"\\]*+)*+" | '[^'\\]*+(?:\\.[^'\\]*+)*+' )
      | (?P<word> [A-Za-z]+ )
      | (?P<number> [+-]? [0-9.] [0-9.eE+-]* )
      | (?P<mark> [\[\](){},:] )
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": "[", ")": "]"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}


def json_text(text: str) -> str:
    """``text`` with every Python token replaced by its JSON counterpart (tuples are arrays); ``ValueError`` where one has none."""
    tokens: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"no literal at {at}")
        at = token.end()
        if string := token["string"]:
            tokens.append(quote(string_value(string[1:-1])))
        elif mark := token["mark"]:
            mark = _BRACKETS.get(mark, mark)
            if mark in "]}" and tokens and tokens[-1] == ",":
                tokens.pop()
            tokens.append(mark)
        else:
            value = _WORDS.get(token["word"]) if token["word"] else number(token["number"])
            if value is None:
                raise ValueError(f"no literal at {at}")
            tokens.append(value)
    return " ".join(tokens)


def string_value(body: str) -> str:
    """The value of a string literal whose quotes are gone. A backslash that begins no escape stays, as Python has it."""
    return _ESCAPE.sub(_unescape, body)


def _unescape(match: re.Match[str]) -> str:
    *hexadecimal, octal, other = match.groups()
    for digits in hexadecimal:
        if digits:
            return _character(int(digits, 16), match[0])
    if octal:
        return chr(int(octal, 8))
    return _ESCAPED.get(other, match[0])


def _character(code: int, written: str) -> str:
    is_character = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_character else written
