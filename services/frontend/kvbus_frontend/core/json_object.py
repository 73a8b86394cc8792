"""The text of a JSON object while a model writes it: what of it can be handed on, so that a reader never holds what is no JSON.

The Messages API wants an object as the input of every call. Its clients read the pieces as they come, and some fail at the first
character that cannot be. What a model writes may be something else. So a piece is handed on once it surely belongs to a JSON
object; what is none in the end becomes one that has the whole text as its member `INVALID_JSON`, the name that Anthropic's
documentation of fine-grained tool streaming gives to such texts. Nothing is lost, and no tool takes a repaired call for a real one.
"""

import json
import re
from enum import Enum, auto

INVALID_JSON = "INVALID_JSON"

MAX_NUMBER = 1024
"""Characters of a number: a longer one is no JSON. Few readers take more than 4,300 digits."""

_SPACE = re.compile(r"[ \t\n\r]+")
_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?\Z")
_NUMERIC = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_CLOSERS = {"{": "}", "[": "]"}


class _At(Enum):
    """What comes next. ``NOWHERE``: what came last cannot be."""

    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()
    VALUE = auto()
    IN_STRING = auto()
    BEHIND_VALUE = auto()
    END = auto()
    NOWHERE = auto()


_CLOSABLE = (_At.FIRST_KEY, _At.FIRST_ITEM, _At.BEHIND_VALUE)
"""Where closers alone make a JSON value of what came so far."""


class ObjectText:
    """Feed pieces, then call `end` for a text that is complete or `rest` for one that was cut off. Linear in the text.

    The pieces that come out are together the text itself, with one exception: control characters in strings, which JSON does not
    allow and models write all the same, come out escaped.
    """

    def __init__(self) -> None:
        self._scanner = _Scanner()
        self._written: list[str] = []
        self._waiting: list[str] = []
        self._began = False
        self._in_string = False

    def feed(self, piece: str) -> str:
        """What can be handed on now. A key waits for its value, a number for its end, the last brace for the end of the text."""
        self._written.append(piece)
        scanner, ready = self._scanner, 0
        if scanner.at is _At.NOWHERE:
            return ""
        scanner.feed(piece)
        while (token := scanner.next()) is not None:
            self._waiting.append(token)
            inside = scanner.at in _CLOSABLE and len(scanner.open) > 1
            if inside or scanner.at in (_At.IN_STRING, _At.BEHIND_VALUE):
                ready = len(self._waiting)
                self._in_string = scanner.at is _At.IN_STRING
        text = "".join(self._waiting[:ready])
        del self._waiting[:ready]
        self._began = self._began or bool(text)
        return text

    def end(self) -> str:
        """What is missing. The text is complete: when it is no object, it is made one. Blank text is an empty object."""
        if self._scanner.at is _At.END:
            return "".join(self._waiting)
        written = "".join(self._written)
        if not written.strip():
            return "{}"
        member = f'"{INVALID_JSON}": {json.dumps(written, ensure_ascii=False)}}}'
        if not self._began:
            return "{" + member
        return ('"' if self._in_string else "") + "".join(reversed(self._scanner.open[1:])) + ", " + member

    def rest(self) -> str:
        """What waits. The text was cut off: nothing is made up, but nothing that cannot be comes out either."""
        return "" if self._scanner.at is _At.NOWHERE else "".join(self._waiting) + self._scanner.tail


def as_object(text: str) -> str:
    """What a reader of all pieces of a complete text has."""
    written = ObjectText()
    return written.feed(text) + written.end()


def complete_members(text: str) -> str:
    """Of an object that was cut off or is broken, as JSON: the members that are complete, and of the last one what is.

    Objects and arrays may stay unfinished, strings and words may not. A number at the very end counts as it is: that is how the
    official clients of the Messages API read unfinished arguments. Without any object it is an empty one.
    """
    scanner, tokens, whole = _Scanner(), [], 0
    scanner.feed(text)
    while (token := scanner.next()) is not None:
        tokens.append(token)
        if scanner.at in _CLOSABLE or scanner.at is _At.END:
            whole = len(tokens)
    if scanner.at in (_At.VALUE, _At.FIRST_ITEM) and _NUMBER.fullmatch(scanner.tail):
        tokens.append(scanner.tail)
        whole = len(tokens)
    return "".join(tokens[:whole]) + "".join(reversed(scanner.open)) or "{}"


class _Scanner:
    """Cuts the text of a JSON object into tokens; strings come in pieces. ``open``: the closers of what is open, from outside."""

    def __init__(self) -> None:
        self.at = _At.START
        self.open: list[str] = []
        self._text = ""
        self._next = 0

    @property
    def tail(self) -> str:
        """What is no token yet."""
        return self._text[self._next :]

    def feed(self, piece: str) -> None:
        self._text = self.tail + piece
        self._next = 0

    def next(self) -> str | None:
        """None: there is nothing more yet, or what follows cannot be."""
        if self.at is _At.NOWHERE or self._next == len(self._text):
            return None
        if self.at in (_At.IN_KEY, _At.IN_STRING):
            return self._in_string()
        space = _SPACE.match(self._text, self._next)
        if space is not None:
            return self._take(space[0], self.at)
        return self._mark(self._text[self._next])

    def _mark(self, mark: str) -> str | None:
        match self.at, mark:
            case ((_At.FIRST_KEY | _At.KEY), '"'):
                return self._take(mark, _At.IN_KEY)
            case _At.COLON, ":":
                return self._take(mark, _At.VALUE)
            case _At.BEHIND_VALUE, ",":
                return self._take(mark, _At.KEY if self.open[-1] == "}" else _At.VALUE)
            case ((_At.FIRST_KEY | _At.FIRST_ITEM | _At.BEHIND_VALUE), ("}" | "]")) if mark == self.open[-1]:
                self.open.pop()
                return self._take(mark, _At.BEHIND_VALUE if self.open else _At.END)
            case (_At.START, "{") | ((_At.FIRST_ITEM | _At.VALUE), ("{" | "[")):
                self.open.append(_CLOSERS[mark])
                return self._take(mark, _At.FIRST_KEY if mark == "{" else _At.FIRST_ITEM)
            case ((_At.FIRST_ITEM | _At.VALUE), '"'):
                return self._take(mark, _At.IN_STRING)
            case ((_At.FIRST_ITEM | _At.VALUE), _):
                return self._number() if _NUMERIC.match(mark) else self._word()
        return self._lost()

    def _in_string(self) -> str | None:
        found = _CHARACTERS.match(self._text, self._next) or _ESCAPE.match(self._text, self._next)
        if found is not None:
            return self._take(found[0], self.at)
        mark = self._text[self._next]
        if mark == '"':
            return self._take(mark, _At.COLON if self.at is _At.IN_KEY else _At.BEHIND_VALUE)
        if mark == "\\":
            return None if _BEGUN_ESCAPE.match(self._text, self._next) else self._lost()
        self._next += 1
        return json.dumps(mark)[1:-1]

    def _number(self) -> str | None:
        found = _NUMERIC.match(self._text, self._next)
        number = found[0] if found is not None else ""
        if len(number) > MAX_NUMBER:
            return self._lost()
        if self._next + len(number) == len(self._text):
            return None  # it may go on
        return self._take(number, _At.BEHIND_VALUE) if _NUMBER.fullmatch(number) else self._lost()

    def _word(self) -> str | None:
        for word in _WORDS:
            if self._text.startswith(word, self._next):
                return self._take(word, _At.BEHIND_VALUE)
            if word.startswith(self._text[self._next : self._next + len(word)]):
                return None
        return self._lost()

    def _take(self, token: str, then: _At) -> str:
        self._next += len(token)
        self.at = then
        return token

    def _lost(self) -> str | None:
        self.at = _At.NOWHERE
        return None
