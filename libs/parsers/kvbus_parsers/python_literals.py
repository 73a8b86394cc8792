"""Python literals as JSON text: what a model writes that answers a request for JSON with ``{'a': True}``.

The text is translated token by token and never compiled: the compiler warns about stray backslashes of a model, and deep nesting is
known to take it down. Models take liberties that are read too: line ends inside strings, leading zeros, ``true`` and ``null``.
"""

import re
import unicodedata
from dataclasses import dataclass

from kvbus_parsers.json_text import escape

# No group is possessive, which is wrong before Python 3.11.5; no branch can give anything back that would match otherwise.
_TOKEN = re.compile(
    r"""(?P<space> \s++ | \#[^\n]*+ )
      | (?P<prefix> [rR]?[bB]? | [bB][rR] | [uU] ) (?P<string>
            \"{3} (?:[^"\\]++ | \\. | "(?!""))* \"{3}
          | '{3} (?:[^'\\]++ | \\. | '(?!''))* '{3}
          | "(?:[^"\\]++ | \\.)*" | '(?:[^'\\]++ | \\.)*' )
      | (?P<signs> (?:[-+]\s*+)* ) (?P<number> \.?\d[\w.]*+ (?: (?<=[eE])[-+]\d++ )? )
      | (?P<word> [A-Za-z]++ )
      | (?P<mark> [,:()\[\]{}] )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}

_DECIMAL = re.compile(r"[0-9]+(_[0-9]+)*")
_BASED = re.compile(r"0([xX](_?[0-9a-fA-F])+|[oO](_?[0-7])+|[bB](_?[01])+)")
_BASED_LENGTH_MAX = 1000
"""Longer ones count as no literal: the conversion to decimal is quadratic, and Python limits it too."""
_FLOAT = re.compile(r"(?P<whole>[0-9]*)(\.(?P<fraction>[0-9]*))?(?P<exponent>[eE][-+]?[0-9]+)?")

_ESCAPE = re.compile(
    r"\\(?: x(?P<byte>[0-9a-fA-F]{2}) | u(?P<short>[0-9a-fA-F]{4}) | U(?P<long>[0-9a-fA-F]{8})"
    r" | N\{(?P<name>[^{}]*+)\} | (?P<octal>[0-7]{1,3}) | (?P<other>.) )",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPED |= {character: character for character in "\\'\""}


def json_text(text: str) -> str:
    """The JSON of the Python literal that ``text`` is; ``ValueError`` if it is none. Tuples and sets are arrays."""
    translation = _Translation()
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or not (token["space"] or translation.add(token)):
            raise ValueError(f"no literal at {at}")
        at = token.end()
    return translation.result()


def string_text(body: str) -> str:
    """What stands between the quotes of a string literal, as it stands inside a JSON string.

    A backslash that begins no escape stays, as Python has it. A surrogate stays an escape: JSON joins a pair of them.
    """
    parts: list[str] = []
    at = 0
    for match in _ESCAPE.finditer(body):
        parts += escape(body[at : match.start()]), _unescape(match)
        at = match.end()
    return "".join(parts) + escape(body[at:])


def _unescape(match: re.Match[str]) -> str:
    if match["name"] is not None:
        try:
            return escape(unicodedata.lookup(match["name"]))
        except KeyError:
            return escape(match[0])
    if match["other"]:
        return escape(_ESCAPED.get(match["other"], match[0]))
    digits = match["byte"] or match["short"] or match["long"]
    code = int(digits, 16) if digits else int(match["octal"], 8)
    if 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return escape(chr(code) if code < 0x110000 else match[0])


def _number(signs: str, text: str) -> str | None:
    """The JSON number, its digits kept; None for what is no Python number, or one that JSON has no form for."""
    minus = "-" if signs.count("-") % 2 else ""
    if _DECIMAL.fullmatch(text):
        return minus + (text.replace("_", "").lstrip("0") or "0")
    if _BASED.fullmatch(text) and len(text) <= _BASED_LENGTH_MAX:
        return minus + str(int(text, 0))
    match = _FLOAT.fullmatch(text.replace("_", ""))
    if match is None or not (match["whole"] or match["fraction"]):
        return None
    fraction = "" if match["fraction"] is None else "." + (match["fraction"] or "0")
    return minus + (match["whole"].lstrip("0") or "0") + fraction + (match["exponent"] or "")


@dataclass(slots=True)
class _Bracket:
    opener: str
    at: int
    """Where in the output it stands: a tuple, a set and a dict are known only by what follows."""
    dict: bool = False
    commas: int = 0
    value: int = -1
    """Where in the output the last item, key or value begins."""
    at_key: bool = False


class _Translation:
    """A stack machine, so nesting has no limit."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._brackets: list[_Bracket] = []
        self._wanted = True  # a value comes next
        self._in_string = False  # the last token is a string, which another one would continue

    def result(self) -> str:
        self._end_string()
        if self._wanted or self._brackets:
            raise ValueError("the literal is not complete")
        return "".join(self._out)

    def add(self, token: re.Match[str]) -> bool:
        """False: this token can not stand here."""
        if token["string"] is not None:
            return self._string(token["prefix"].lower(), token["string"])
        self._end_string()
        mark: str | None = token["mark"]
        if mark is None:
            value = _WORDS.get(token["word"]) if token["word"] else _number(token["signs"], token["number"])
            return value is not None and self._value(value)
        if mark in "([{":
            if not self._value(mark):
                return False
            self._brackets.append(_Bracket(mark, len(self._out) - 1, at_key=mark == "{"))
            self._wanted = True
            return True
        if not self._brackets:
            return False
        bracket = self._brackets[-1]
        if mark in ")]}":
            return self._close(bracket, mark)
        return self._comma(bracket) if mark == "," else self._colon(bracket)

    def _value(self, text: str) -> bool:
        if not self._wanted:
            return False
        if self._brackets:
            self._brackets[-1].value = len(self._out)
        self._out.append(text)
        self._wanted = False
        return True

    def _string(self, prefix: str, literal: str) -> bool:
        if not (self._in_string or self._value('"')):
            return False
        self._in_string = True
        quotes = 3 if literal[:3] in ('"""', "'''") else 1
        body = literal[quotes:-quotes]
        self._out.append(escape(body) if "r" in prefix else string_text(body))
        return True

    def _end_string(self) -> None:
        if self._in_string:
            self._out.append('"')
            self._in_string = False

    def _comma(self, bracket: _Bracket) -> bool:
        if self._wanted or (bracket.dict and bracket.at_key):
            return False
        bracket.commas += 1
        bracket.at_key = bracket.dict
        self._out.append(", ")
        self._wanted = True
        return True

    def _colon(self, bracket: _Bracket) -> bool:
        key = self._out[bracket.value]
        if self._wanted or not bracket.at_key or (bracket.commas and not bracket.dict) or key in ("[", "{", ""):
            return False
        if key != '"':
            self._out[bracket.value] = f'"{key}"'
        bracket.dict, bracket.at_key = True, False
        self._out.append(": ")
        self._wanted = True
        return True

    def _close(self, bracket: _Bracket, closer: str) -> bool:
        empty = bracket.value < 0
        if bracket.opener + closer not in ("()", "[]", "{}") or (bracket.dict and bracket.at_key and not self._wanted):
            return False
        if self._wanted and not empty:
            if self._out[-1] != ", ":
                return False
            self._out.pop()  # a comma may follow the last item
        opener = bracket.opener
        if opener == "(":
            opener = "[" if empty or bracket.commas else ""
        elif opener == "{" and not (empty or bracket.dict):
            opener = "["
        self._out[bracket.at] = opener
        self._out.append({"[": "]", "{": "}", "": ""}[opener])
        self._brackets.pop()
        self._wanted = False
        return True
