"""The arguments of a Python call, read as they come and written as a JSON object.

A string argument goes out while it is read. Every other value is read to its end, brackets and strings respected, and then
translated; what is no literal (an expression, a positional argument, a missing value) goes out as it was written, which leaves the
arguments no JSON: such a call is seen to be broken, and nothing is invented. No recursion: nesting has no limit.
"""

import re
from collections import Counter

from kvbus_parsers.json_text import escape, quote
from kvbus_parsers.python_literals import json_text, string_text
from kvbus_parsers.source import Emit, Markers, Source, Step, markers

NAME = re.compile(r"[\w.-]*+")
"""The name of a function or an argument. Dots and hyphens: names of tools need not be Python's."""

_WORD = re.compile(r"\w*+")
_QUOTES = markers('"""', "'''", '"', "'")
_STRING_STOPS = {quotes: markers(quotes, "\\") for quotes in ("", *_QUOTES.texts)}
_PREFIXES = {"", "r", "u", "b", "br", "rb"}
_PREFIXES_WITH_CODE = {"f", "fr", "rf", "t", "tr", "rt"}
_EXPRESSION_STOPS = tuple(",()[]{}'\"")
_LAST_WORD = re.compile(r"\w*+\Z")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}

_DIGITS = {"x": ("[0-9a-fA-F]", 2), "u": ("[0-9a-fA-F]", 4), "U": ("[0-9a-fA-F]", 8)} | dict.fromkeys(
    "01234567", ("[0-7]", 2)
)
_NAME_END = markers("}")
_NAME_LENGTH_MAX = 100


def arguments(source: Source, emit: Emit, ends: Markers = markers()) -> Step[bool]:  # noqa: B008
    """Reads what stands after the opening parenthesis of a call, to its end; False when the input ends first.

    An unmatched ``]`` and the markers ``ends`` outside strings end the call too and are left unread: what is around it is over. The
    JSON that went out then lacks its end.
    """
    emit("{")
    lead = ""
    while True:
        yield from source.skip_space()
        if (yield from source.literal(")")):
            emit("}")
            return True
        char = yield from source.peek()
        if char in ("", "]") or (yield from _at(source, ends)):
            return char != ""
        name = yield from source.take_while(NAME)
        space = yield from source.skip_space()
        if name and (yield from single_equals(source)):
            emit(f"{lead}{quote(name)}: ")
            yield from source.skip_space()
            yield from _value(source, emit, ends)
        else:
            # A comma without an argument before it must not pass for the harmless one behind the last argument.
            text = yield from _expression(source, name + space, ends)
            if source.cut_off:
                return False
            emit(lead + text or ",")
        lead = ", " if (yield from source.literal(",")) else ""


def single_equals(source: Source) -> Step[bool]:
    """Reads the equals sign after the name of an argument, but not a comparison."""
    if not (yield from source.literal("=")):
        return False
    if (yield from source.peek()) == "=":
        source.unread("=")
        return False
    return True


def _value(source: Source, emit: Emit, ends: Markers) -> Step[None]:
    prefix = yield from source.take_while(_WORD)
    if not (yield from _at_string(source, prefix)):
        text = yield from _expression(source, prefix, ends)
        try:
            emit(json_text(text))
        except ValueError:
            emit(text.rstrip())
        return
    emit('"')
    space = ""
    while (yield from _at_string(source, prefix)):
        if not (yield from _string(source, raw="r" in prefix.lower(), emit=emit)):
            return
        space = yield from source.skip_space()
        prefix = yield from source.take_while(_WORD)
    emit('"')
    rest = (yield from _expression(source, prefix, ends)).rstrip()
    if rest:
        emit(space + rest)


def _at_string(source: Source, prefix: str) -> Step[bool]:
    char = yield from source.peek()
    return char in ("'", '"') and prefix.lower() in _PREFIXES


def _string(source: Source, *, raw: bool, emit: Emit) -> Step[bool]:
    """Reads one string literal from its opening quotes on; False when the input ends in it."""
    quotes = (yield from source.one_of(_QUOTES)) or ""
    while True:
        stop = yield from source.until(_STRING_STOPS[quotes], lambda run: emit(escape(run)))
        if stop != "\\":
            return stop is not None
        sequence = yield from _escape_sequence(source)
        emit(escape(sequence) if raw else string_text(sequence))


def _escape_sequence(source: Source) -> Step[str]:
    """A backslash, which is read already, and what belongs to it."""
    char = yield from source.peek()
    yield from source.literal(char)
    if char == "N" and (yield from source.literal("{")):
        name, end = yield from source.take_until(_NAME_END, _NAME_LENGTH_MAX)
        return f"\\N{{{name}{end or ''}"
    digits, length = _DIGITS.get(char, ("", 0))
    parts = ["\\", char]
    for _ in range(length):
        digit = yield from source.peek()
        if not re.match(digits, digit):
            break
        yield from source.literal(digit)
        parts.append(digit)
    return "".join(parts)


def _expression(source: Source, begun: str, ends: Markers) -> Step[str]:
    """The text, of which ``begun`` is read, up to the comma, bracket or marker that ends an argument, which is left unread."""
    parts: list[str] = []
    open_brackets: list[str] = []
    closers: Counter[str] = Counter()
    stops = markers(*_EXPRESSION_STOPS, *ends.texts)
    run = [begun]
    while True:
        char = yield from source.until(stops, run.append)
        parts += run
        if char is None:
            break
        if char in ends.texts or (char == "," and not open_brackets):
            source.unread(char)
            break
        if char in "'\"":
            word = _LAST_WORD.search("".join(run))
            if word and word[0].lower() in _PREFIXES | _PREFIXES_WITH_CODE:
                source.unread(char)
                run = []
                yield from _copy_string(source, parts)
                continue
            # An apostrophe after a word opens no string.
        elif char in _CLOSERS:
            open_brackets.append(_CLOSERS[char])
            closers[_CLOSERS[char]] += 1
        elif char != ",":
            if not closers[char] and char != "}":
                source.unread(char)
                break
            while closers[char]:
                closer = open_brackets.pop()
                closers[closer] -= 1
                if closer == char:
                    break
        run = []
        parts.append(char)
    return "".join(parts)


def _at(source: Source, ends: Markers) -> Step[bool]:
    found = yield from source.one_of(ends)
    source.unread(found or "")
    return found is not None


def _copy_string(source: Source, parts: list[str]) -> Step[None]:
    quotes = (yield from source.one_of(_QUOTES)) or ""
    parts.append(quotes)
    while True:
        stop = yield from source.until(_STRING_STOPS[quotes], parts.append)
        parts.append(stop or "")
        if stop != "\\":
            return
        char = yield from source.peek()
        yield from source.literal(char)
        parts.append(char)
