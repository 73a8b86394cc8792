"""Gemma's notation of arguments, read as it comes and written as JSON.

    {path:<|"|>a.txt<|"|>,depth:2,nested:{deep:[1,true,<|"|>x<|"|>]}}

Strings stand between delimiters and have no escapes; everything else is bare. Models leave out the delimiters of short words too.
What is no grammar goes out as it was written, which leaves the arguments no JSON. No recursion: nesting has no limit.
"""

from kvbus_parsers.json_text import escape, number, quote
from kvbus_parsers.source import Emit, Markers, Source, Step, markers

_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def arguments(source: Source, emit: Emit, delimiter: str, ends: Markers) -> Step[bool]:
    """Reads what stands behind the opening brace, to the closing one; False when the input ends first.

    One of the markers ``ends`` outside strings ends it too, and is left unread. The JSON that went out then lacks its end.
    """
    return (yield from _Reader(source, emit, delimiter, ends).read())


class _Reader:
    def __init__(self, source: Source, emit: Emit, delimiter: str, ends: Markers) -> None:
        self._source = source
        self._emit = emit
        self._quote = delimiter
        self._quotes = markers(delimiter)
        self._ends = ends
        self._key_stops = markers(":", ",", "{", "}", "[", "]", delimiter, *ends.texts)
        self._value_stops = markers(",", "}", "]", delimiter, *ends.texts)
        self._closers = ["}"]
        self._arrays = 0
        self._filled = False
        """An item stands behind the last comma or opening bracket."""
        self._lead = ""
        """What goes out before the next item."""

    def read(self) -> Step[bool]:
        source = self._source
        self._emit("{")
        while self._closers:
            yield from source.skip_space()
            end = yield from source.one_of(self._ends)
            if end:
                source.unread(end)
                return True
            char = yield from source.peek()
            if not char:
                return False
            if char in "]}":
                yield from source.literal(char)
                self._close(char)
            elif char == ",":
                yield from source.literal(char)
                self._comma()
            elif self._filled:
                stop = yield from source.until(self._value_stops, self._emit)
                source.unread(stop or "")
                if stop == self._quote:
                    yield from self._value()
            elif not (yield from self._item()):
                return False
        return True

    def _close(self, char: str) -> None:
        if char == "]" and not self._arrays:
            self._emit(char)
            return
        while (closer := self._closers.pop()) != char:
            self._arrays -= closer == "]"
        self._arrays -= char == "]"
        self._emit(char)
        self._filled, self._lead = True, ""

    def _comma(self) -> None:
        if not self._filled:
            self._emit(self._lead + ",")
        self._filled, self._lead = False, ", " if self._filled else ""

    def _item(self) -> Step[bool]:
        self._emit(self._lead)
        self._filled, self._lead = True, ""
        if self._closers[-1] == "}":
            if not (yield from self._key()):
                return True
            yield from self._source.skip_space()
        return (yield from self._value())

    def _key(self) -> Step[bool]:
        """Reads a key and its colon; what is none goes out as it is."""
        source = self._source
        parts: list[str] = []
        if (yield from source.literal(self._quote)):
            yield from source.until(self._quotes, parts.append)
            yield from source.skip_space()
            if (yield from source.literal(":")):
                self._emit(f"{quote(''.join(parts))}: ")
                return True
            self._emit(quote("".join(parts)))
            return False
        stop = yield from source.until(self._key_stops, parts.append)
        if stop == ":":
            self._emit(f"{quote(''.join(parts).strip())}: ")
            return True
        source.unread(stop or "")
        self._emit("".join(parts))
        return False

    def _value(self) -> Step[bool]:
        source = self._source
        if (yield from source.literal(self._quote)):
            self._emit('"')
            if not (yield from source.until(self._quotes, lambda text: self._emit(escape(text)))):
                return False
            self._emit('"')
            return True
        char = yield from source.peek()
        if char and char in "{[":
            yield from source.literal(char)
            self._emit(char)
            self._closers.append("}" if char == "{" else "]")
            self._arrays += char == "["
            self._filled = False
            return True
        parts: list[str] = []
        stop = yield from source.until(self._value_stops, parts.append)
        source.unread(stop or "")
        text = "".join(parts).strip()
        is_word = text and ":" not in text and '"' not in text
        self._emit(_WORDS.get(text) or number(text) or (quote(text) if is_word else text))
        return stop is not None
