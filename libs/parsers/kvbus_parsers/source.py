"""The unread output of a model, and the primitives with which a grammar reads it.

A grammar is a generator (`Step`) that pulls what it needs from a `Source` and yields while its input is still missing. A primitive
decides only on complete information, so how the input is cut into pieces can not change what a grammar finds: a format reads like
its grammar, and any chunking gives the same result.

`scanned` counts the characters that primitives looked at; it grows linearly with the output for every grammar.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from kvbus_parsers.json_scan import JsonEnd, JsonScanner

T = TypeVar("T")

Step = Generator[None, None, T]
"""A piece of grammar: yields while input is missing, returns what it read."""

Emit = Callable[[str], object]

_NEVER = r"(?!)"
_SPACE = re.compile(r"\s*+")


class Markers:
    """A set of marker texts, compiled. Made by `markers`, which remembers them."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = frozenset(texts)
        self.longest = max(map(len, texts), default=0)
        ordered = sorted(self.texts, key=len, reverse=True)  # leftmost, then longest
        whole = "|".join(map(re.escape, ordered)) or _NEVER
        growing = [_proper_prefixes(text) + r"\Z" for text in ordered if len(text) > 1]
        self._whole = re.compile(whole)
        self._growing = re.compile("|".join(growing) or _NEVER)
        self._either = re.compile("|".join([*growing, whole]))
        # markers with which another one begins
        self._stems = frozenset(text for text in texts if any(other.startswith(text) for other in self.texts - {text}))

    def find(self, text: str, start: int, *, final: bool) -> tuple[int, int]:
        """Where the leftmost marker begins and ends, the longest of those that begin there.

        If none is certain, both are the position up to which there is none for certain: the end of the text, or, unless it is
        ``final``, the longest suffix that can still become a marker.
        """
        found = (self._whole if final else self._either).search(text, start)
        if found is None:
            end = len(text)
            return end, end
        begin, end = found.span()
        if not final and end == len(text):
            marker = found.group()
            if marker not in self.texts or marker in self._stems:
                return begin, begin
        return begin, end

    def match(self, text: str) -> str | None:
        """The longest marker with which the text begins."""
        found = self._whole.match(text)
        return found.group() if found else None

    def may_begin(self, text: str) -> bool:
        """Whether the text is shorter than some marker that begins with it."""
        return len(text) < self.longest and (not text or self._growing.match(text) is not None)


def _proper_prefixes(marker: str) -> str:
    pattern = ""
    for character in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return re.escape(marker[0]) + pattern


@lru_cache(maxsize=1024)
def markers(*texts: str) -> Markers:
    return Markers(tuple(filter(None, texts)))


class Source:
    """Buffered unread input. What was read is gone, unless a grammar records it to be able to go back."""

    __slots__ = ("_at", "_buffer", "_cut", "_finished", "_recorded", "_recordings", "scanned")

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._finished = False
        self._cut = False
        self._recorded: list[str] = []
        self._recordings = 0
        self.scanned = 0

    # --- the side of the parser

    def feed(self, text: str) -> None:
        self._buffer = text if self._at == len(self._buffer) else self._buffer[self._at :] + text
        self._at = 0

    def finish(self, *, cut: bool) -> None:
        """No more input comes. ``cut``: the model did not end the output by itself."""
        self._finished = True
        self._cut = cut

    # --- what a grammar may ask without waiting

    @property
    def cut_off(self) -> bool:
        """All input is read, and the output was cut: what is unfinished now would have gone on."""
        return self._cut and self._at == len(self._buffer)

    @property
    def exhausted(self) -> bool:
        """All input is read and no more comes."""
        return self._finished and self._at == len(self._buffer)

    def cut_within(self, choices: Markers) -> bool:
        """The output was cut, and what is unread of it, if anything, is the beginning of one of these."""
        return self._finished and self._cut and choices.may_begin(self._buffer[self._at :])

    def unread(self, text: str) -> None:
        """Gives back the text that was read last."""
        start = self._at - len(text)
        if start >= 0 and self._buffer.startswith(text, start):
            self._at = start
        else:
            self._buffer = text + self._buffer[self._at :]
            self._at = 0
        if self._recordings:
            surplus = len(text)
            while surplus and self._recorded:
                last = self._recorded.pop()
                if len(last) > surplus:
                    self._recorded.append(last[:-surplus])
                surplus -= min(surplus, len(last))

    def record(self) -> int:
        """Keeps what is read from here on, so that `rewind` can give it back. End it with `rewind` or `keep`; both nest."""
        self._recordings += 1
        return len(self._recorded)

    def recorded(self, recording: int) -> str:
        """What was read since `record`."""
        return "".join(self._recorded[recording:])

    def rewind(self, recording: int) -> None:
        """Back to where the recording began."""
        text = self.recorded(recording)
        self.unread(text)
        self.keep(recording)

    def keep(self, recording: int) -> None:
        """What was read stays read."""
        self._recordings -= 1
        if not self._recordings:
            self._recorded.clear()

    def dismiss(self, recording: int) -> bool:
        """For an opener without the shape that must follow it: gives back what was read since, and returns False, because the
        opener is text. Where the output was cut here it would have gone on: then it stays read, and the answer is True.
        """
        if self.cut_off:
            self.keep(recording)
            return True
        self.rewind(recording)
        return False

    # --- primitives

    def until(self, stops: Markers, emit: Emit, *, in_call: bool = False) -> Step[str | None]:
        """Passes on text up to the first marker, which is read and returned; ``None`` when the output ends before one.

        Holds back only the longest suffix that can still grow into a marker; what is held at the end is passed on. ``in_call``:
        but not if the output was cut, because then it is no argument but half a marker.
        """
        find = stops.find
        while True:
            buffer, at = self._buffer, self._at
            begin, end = find(buffer, at, final=self._finished)
            if in_call and self._cut and begin == end:
                begin = end = find(buffer, at, final=False)[0]
            self.scanned += (end if end > begin else len(buffer)) - at
            if begin > at:
                emit(self._take(begin))
            if end > begin:
                return self._take(end)
            if self._finished:
                self._take(len(buffer))
                return None
            yield

    def take_until(self, stops: Markers, limit: int = 1024) -> Step[tuple[str, str | None]]:
        """The text up to the first marker, and the marker. Gives up (``None`` for the marker) at the end or beyond ``limit``."""
        parts: list[str] = []
        length = 0
        while True:
            buffer, at = self._buffer, self._at
            # Beyond the limit no marker counts, so it is not looked for: else each call would search the whole buffer.
            window = buffer[at : at + limit - length + stops.longest]
            begin, end = (at + position for position in stops.find(window, 0, final=self._finished))
            self.scanned += end - at if end > begin else len(window)
            length += begin - at
            if length > limit:
                parts.append(self._take(begin - (length - limit)))
                return "".join(parts), None
            parts.append(self._take(begin))
            if end > begin:
                return "".join(parts), self._take(end)
            if self._finished:
                return "".join(parts), None
            yield

    def literal(self, text: str) -> Step[bool]:
        """Reads exactly this text if it stands here; else reads nothing."""
        while True:
            ready = self._buffer[self._at : self._at + len(text)]
            self.scanned += len(ready)
            if ready == text:
                self._take(self._at + len(text))
                return True
            if self._finished or not text.startswith(ready):
                return False
            yield

    def one_of(self, choices: Markers) -> Step[str | None]:
        """Reads the longest of the markers that stands here; ``None``, and nothing read, if none does."""
        while True:
            ready = self._buffer[self._at : self._at + choices.longest]
            self.scanned += len(ready)
            if self._finished or not choices.may_begin(ready):
                found = choices.match(ready)
                return self._take(self._at + len(found)) if found else None
            yield

    def take_while(self, run: re.Pattern[str]) -> Step[str]:
        """Reads the longest run that the pattern matches from here; the pattern must be a repeated character class: ``[a-z]*``."""
        parts: list[str] = []
        while True:
            found = run.match(self._buffer, self._at)
            end = found.end() if found else self._at
            self.scanned += end - self._at
            parts.append(self._take(end))
            if end < len(self._buffer) or self._finished:
                return "".join(parts)
            yield

    def skip_space(self) -> Step[str]:
        """Reads white space, and returns it."""
        return (yield from self.take_while(_SPACE))

    def peek(self) -> Step[str]:
        """The next character, unread; empty at the end of the output."""
        while self._at == len(self._buffer) and not self._finished:
            yield
        return self._buffer[self._at : self._at + 1]

    def ahead(self, characters: str) -> Step[bool]:
        """Whether the next character after white space is one of these. If so the white space is read, else nothing is."""
        space = yield from self.skip_space()
        character = yield from self.peek()
        if character and character in characters:
            return True
        self.unread(space)
        return False

    def json_value(self, emit: Emit) -> Step[JsonEnd]:
        """Passes on one JSON value as it comes, its end found by the grammar of JSON. White space before it is not allowed.

        Stands after the value, or, if it is invalid, before the first character that can not belong to it. Raw control characters
        in strings, which JSON forbids and models write, are passed on escaped.
        """
        scanner = JsonScanner()
        while True:
            buffer, at = self._buffer, self._at
            end = scanner.scan(buffer, at, emit)
            self.scanned += end - at
            self._take(end)
            if scanner.end:
                return scanner.end
            if self._finished:
                if end < len(buffer) and scanner.finish(emit) is JsonEnd.CUT:
                    emit(self._take(len(buffer)))  # the beginning of an escape
                return scanner.finish(emit)
            yield

    def _take(self, end: int) -> str:
        text = self._buffer[self._at : end]
        self._at = end
        if self._recordings and text:
            self._recorded.append(text)
        return text
