"""Finds the end of a JSON value in text that comes in pieces."""

import re
from collections.abc import Callable
from enum import Enum, auto

MAX_DEPTH = 256
"""Deeper values are taken as invalid: readers of JSON give up not far beyond."""

# The group is not possessive: Python before 3.11.5 gets that wrong.
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SPACE = re.compile(r"[ \t\n\r]*+")
_BARE = re.compile(r"[-+.0-9A-Za-z]*+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


class JsonEnd(Enum):
    COMPLETE = auto()
    INVALID = auto()
    CUT = auto()


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after `[`
    KEY_OR_END = auto()  # after `{`
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Scans one value. ``end`` is set as soon as the value is over or can not go on."""

    def __init__(self) -> None:
        self.end: JsonEnd | None = None
        self._open: list[str] = []  # the closers of the open arrays and objects
        self._expect = _Expect.VALUE
        self._in_string = False
        self._bare: list[str] | None = None  # the number or word being read, in pieces

    def scan(self, text: str, at: int, emit: Callable[[str], object]) -> int:
        """Passes on what belongs to the value from ``at`` on; returns where it stopped."""
        start = at  # passed on up to here
        size = len(text)
        while self.end is None:
            if self._in_string:
                found = _STRING.match(text, at)
                at = found.end() if found else at
                if at == size or (text[at] == "\\" and _OPEN_ESCAPE.match(text, at)):
                    break
                if text[at] == '"':
                    at += 1
                    self._in_string = False
                    self._after_value_or_key()
                elif text[at] == "\\":
                    self.end = JsonEnd.INVALID
                else:
                    if at > start:
                        emit(text[start:at])
                    emit(_ESCAPES.get(text[at], f"\\u{ord(text[at]):04x}"))
                    start = at = at + 1
            elif self._bare is not None:
                found = _BARE.match(text, at)
                end = found.end() if found else at
                self._bare.append(text[at:end])
                at = end
                if at == size:
                    break
                self._end_bare()
            else:
                found = _SPACE.match(text, at)
                if self._expect is not _Expect.VALUE or self._open:
                    at = found.end() if found else at
                if at == size:
                    break
                at = self._structure(text[at], at)
        if at > start:
            emit(text[start:at])
        return at

    def finish(self, emit: Callable[[str], object]) -> JsonEnd:
        """The text ends here: complete only if the value is a number or word that is whole."""
        if self._bare is not None:
            self._end_bare()
        return self.end or JsonEnd.CUT

    def _structure(self, character: str, at: int) -> int:
        """One character outside strings and scalars; returns the position after it, or ``at`` itself if it is not read."""
        expect = self._expect
        if expect in (_Expect.VALUE_OR_END, _Expect.KEY_OR_END, _Expect.COMMA_OR_END) and character == self._open[-1]:
            self._open.pop()
            self._after_value_or_key(value=True)
        elif expect is _Expect.COMMA_OR_END and character == ",":
            self._expect = _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE
        elif expect is _Expect.COLON and character == ":":
            self._expect = _Expect.VALUE
        elif expect in (_Expect.KEY, _Expect.KEY_OR_END) and character == '"':
            self._expect = _Expect.KEY
            self._in_string = True
        elif expect in (_Expect.VALUE, _Expect.VALUE_OR_END):
            return self._value(character, at)
        else:
            self.end = JsonEnd.INVALID
            return at
        return at + 1

    def _value(self, character: str, at: int) -> int:
        self._expect = _Expect.VALUE
        if character == '"':
            self._in_string = True
        elif character in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append("}" if character == "{" else "]")
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
        elif _BARE.fullmatch(character):
            self._bare = []
            return at
        else:
            self.end = JsonEnd.INVALID
            return at
        return at + 1

    def _after_value_or_key(self, *, value: bool = False) -> None:
        if self._expect is _Expect.KEY and not value:
            self._expect = _Expect.COLON
        elif self._open:
            self._expect = _Expect.COMMA_OR_END
        else:
            self.end = JsonEnd.COMPLETE

    def _end_bare(self) -> None:
        whole = "".join(self._bare or ())
        self._bare = None
        if _SCALAR.fullmatch(whole):
            self._after_value_or_key(value=True)
        else:
            self.end = JsonEnd.INVALID
