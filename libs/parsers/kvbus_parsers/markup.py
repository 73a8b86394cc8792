"""What the XML-like formats have in common: tags with attributes, values that end at a tag, sections around calls."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context
from kvbus_parsers.json_calls import at_marker
from kvbus_parsers.source import Emit, Markers, Source, Step, markers

_TAG_STOPS = markers(">", '"', "'", "\n", "<")
_QUOTES = {'"': markers('"', "\n"), "'": markers("'", "\n")}
# The names are matched from their beginnings only, which keeps the search linear.
_BARE_ATTRIBUTE = re.compile(r"""(?<![\w.:-])([\w.:-]++)\s*=\s*([^\s"'>]++)""")
_QUOTED_ATTRIBUTE = re.compile(r"(?<![\w.:-])([\w.:-]++)\s*=\s*\Z")
_BEHIND_NAME = {" ", "\t", "\n", "/", ">"}


@dataclass(frozen=True, slots=True)
class Tag:
    attributes: Mapping[str, str]
    self_closing: bool


def tag_rest(source: Source) -> Step[Tag | None]:
    """Reads a tag behind its name: `` key="value" …>``, the values in double, single or no quotes.

    ``None`` if it is none; what was read of it is read.
    """
    attributes: dict[str, str] = {}
    text = ""
    if (yield from source.peek()) not in _BEHIND_NAME:
        return None
    while True:
        part, stop = yield from source.take_until(_TAG_STOPS)
        text += part
        attribute = _QUOTED_ATTRIBUTE.search(text)
        if stop in _QUOTES and attribute:
            value, stop = yield from source.take_until(_QUOTES[stop])
            if stop in _QUOTES:
                attributes[attribute[1]] = value
                text = text[: attribute.start()].rstrip() + " "
                continue
        if stop == ">":
            body = text.rstrip()
            self_closing = body.endswith("/")
            attributes |= _BARE_ATTRIBUTE.findall(body.removesuffix("/"))
            return Tag(attributes, self_closing)
        return None


Ends = Mapping[str, Markers | None]
"""The markers that end a value, each with what has to follow it, behind white space, to be no data (``None``: anything)."""


def argument(
    context: Context,
    writer: ArgumentWriter,
    key: str,
    ends: Ends,
    *,
    schema: Schema | None = None,
    framed: bool = False,
) -> Step[str | None]:
    """Reads a value into the argument ``key``. Returns the marker that ended it, ``None`` if the output did."""
    writer.begin(key, schema, framed=framed)
    stop = yield from value(context, writer.text, ends)
    if stop is None:
        writer.abandon()
    else:
        writer.end()
    return stop


def value(context: Context, emit: Emit, ends: Ends) -> Step[str | None]:
    """Passes on a value as it comes. Returns the marker that ended it, ``None`` if the output did."""
    source = context.source
    stops = markers(*ends)
    while True:
        stop = yield from source.until(stops, emit, in_call=True)
        if stop is None:
            return None
        followers = ends[stop]
        if followers is None or (yield from _followed_by(context, followers)):
            return stop
        emit(stop)


def _followed_by(context: Context, followers: Markers) -> Step[bool]:
    source = context.source
    space = yield from source.skip_space()
    found = (yield from at_marker(context, followers)) or (source.exhausted and not source.cut_off)
    source.unread(space)
    return found


CallReader = Callable[[Context, str], Step[bool]]
"""Reads a call behind its opener. False, with everything given back, if it is none."""


@dataclass(frozen=True, slots=True)
class Section:
    """Calls between section markers: ``OPENER call call … CLOSER``. The closer may be missing; ``strays`` are swallowed."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    call_openers: tuple[str, ...]
    read_call: CallReader
    strays: tuple[str, ...] = ()

    def read(self, context: Context, opener: str) -> Step[bool]:
        """Reads on behind one of ``openers``, which is a word in prose unless a call or the closer follows (`ToolFormat.read`)."""
        source, sink = context.source, context.sink
        inside = markers(*self.openers, *self.closers, *self.call_openers, *self.strays)
        recording = source.record()
        yield from source.skip_space()
        tag = yield from source.one_of(inside)
        if tag in self.openers:  # twice, but not any number of times: giving back must stay cheap
            yield from source.skip_space()
            tag = yield from source.one_of(inside)
        if (tag is None or tag in self.openers) and not (yield from cut_off(context, inside)):
            source.rewind(recording)
            return False
        source.keep(recording)
        sink.marker()
        while tag is not None and tag not in self.closers:
            if tag in self.call_openers:
                yield from self.read_call(context, tag)
            tag = yield from self._next(context, inside)
        sink.marker()
        return True

    def _next(self, context: Context, inside: Markers) -> Step[str | None]:
        """The next tag of the section. What stands before it is prose. ``None``: the section is over without a closer."""
        source = context.source
        recording = source.record()
        yield from source.skip_space()
        tag = yield from source.one_of(inside)
        if tag is None and not (yield from cut_off(context, inside)):
            junk, tag = yield from source.take_until(inside)
            if tag is None:
                source.rewind(recording)
                return None
            context.sink.prose(junk)
        source.keep(recording)
        return tag


def cut_off(context: Context, choices: Markers) -> Step[bool]:
    """Whether the output was cut in front of or within one of the markers. If so the rest is read: nothing can be made of it."""
    source = context.source
    cut = source.cut_within(choices)
    if cut:
        yield from source.until(markers(), lambda _: None)
    return cut
