"""The input of a custom tool out of the JSON arguments it travels in: ``{"input": "..."}``, undone while it is being written."""

import re

import msgspec

from kvbus_protocols.conversation import CUSTOM_INPUT

_HEAD = re.compile(r'\s*\{\s*"' + CUSTOM_INPUT + r'"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_LONGEST_HEAD = 256
"""Arguments that have not come to the text by then are of another form."""
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\ufffd"


class FreeText:
    """Feed the arguments piece by piece; ``text`` is what has come out so far. Other forms come out whole, at the end."""

    def __init__(self) -> None:
        self._held = ""
        self._pieces: list[str] = []
        self._in_string = False
        self._over = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, piece: str) -> str:
        """What has become certain."""
        if self._over:
            return ""
        self._held += piece
        if not self._in_string:
            head = _HEAD.match(self._held)
            if head is None:
                self._over = len(self._held) > _LONGEST_HEAD
                return ""
            self._in_string = True
            self._held = self._held[head.end() :]
        return self._give(self._read())

    def finish(self, arguments: str) -> str:
        """The rest, when the call is complete. ``arguments``: all of them."""
        self._over = True
        whole, given = _whole(arguments), self.text
        return self._give(whole[len(given) :] if whole.startswith(given) else "")

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _read(self) -> str:
        """Decode the string as far as it has come; an escape sequence that is not complete stays."""
        read: list[str] = []
        text, at = self._held, 0
        while at < len(text) and not self._over:
            if (plain := _PLAIN.match(text, at)) is not None:
                read.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._over = True
            else:
                decoded, size = _escape(text, at)
                if not size:
                    break
                read.append(decoded)
                at += size
        self._held = text[at:]
        return "".join(read)


def _escape(text: str, at: int) -> tuple[str, int]:
    """The character that an escape sequence stands for, and the length of the sequence; 0 when more of it has to come."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return (_ESCAPES.get(kind, kind), 2) if kind else ("", 0)
    unit = _code_unit(text, at)
    if unit is None:
        return "", 0
    if not 0xD800 <= unit < 0xE000:
        return chr(unit) if unit >= 0 else _REPLACEMENT, 6
    following = text[at + 6 : at + 8]
    if unit >= 0xDC00 or (following and not "\\u".startswith(following)):
        return _REPLACEMENT, 6
    low = _code_unit(text, at + 6) if following == "\\u" else None
    if low is None:
        return "", 0
    if not 0xDC00 <= low < 0xE000:
        return _REPLACEMENT, 6
    return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), 12


def _code_unit(text: str, at: int) -> int | None:
    r"""Of ``\uXXXX``; None: not all of it is there; -1: these are no digits."""
    digits = text[at + 2 : at + 6]
    if len(digits) < 4:
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return -1


def _whole(arguments: str) -> str:
    """The text that these arguments mean: the one string in them, or else all of it as it is."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        texts = [text for text in value.values() if isinstance(text, str)]
        if isinstance(value.get(CUSTOM_INPUT), str):
            return str(value[CUSTOM_INPUT])
        if len(value) == len(texts) == 1:
            return texts[0]
    return value if isinstance(value, str) else arguments
