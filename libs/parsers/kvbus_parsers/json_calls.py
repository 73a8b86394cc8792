"""Calls written as JSON: one object with a name and arguments, or an array of them."""

import re
from dataclasses import dataclass
from enum import Enum, auto

from kvbus_parsers.grammar import Context
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.json_text import string
from kvbus_parsers.source import Markers, Step, markers


class CallEnd(Enum):
    CALLED = auto()  # the JSON is read to its end
    BROKEN = auto()  # read up to the next stop marker: the rest went out as raw arguments or as prose
    REJECTED = auto()  # no call: everything is given back
    CUT = auto()  # the output ended inside; nothing is left to read


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The members that make a call. ``strict``: anything but an object with name and arguments alone is data, not a call."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("type", "id")
    strict: bool = False


NO_STOPS = markers()
_BRACES = re.compile(r"[\s}]*+")


def call_array(context: Context, keys: CallKeys, stops: Markers = NO_STOPS) -> Step[CallEnd]:
    """Reads ``[{call}, …]``. ``stops``: the markers at which a broken element ends (the format's closers and openers)."""
    source = context.source
    if not (yield from source.literal("[")):
        return CallEnd.REJECTED
    opening = "[" + (yield from source.skip_space())
    if (yield from source.literal("]")):
        if keys.strict:
            source.unread(opening + "]")
            return CallEnd.REJECTED
        return CallEnd.CALLED
    first = True
    while True:
        ended = yield from call_object(context, keys, stops)
        if ended is CallEnd.REJECTED and first:
            source.unread(opening)
            return ended
        if ended is CallEnd.REJECTED:
            yield from broken_rest(context, stops)
            return CallEnd.BROKEN
        if ended is not CallEnd.CALLED:
            return ended
        first = False
        yield from source.skip_space()
        if (yield from source.literal("]")):
            return CallEnd.CALLED
        if (yield from source.literal(",")):
            yield from source.skip_space()
        elif not (yield from source.ahead("{")):
            return CallEnd.CUT if source.exhausted else CallEnd.CALLED


def broken_rest(context: Context, stops: Markers) -> Step[None]:
    """What stands here up to the next stop is no grammar: it is prose."""
    marker = yield from context.source.until(stops, context.sink.prose)
    if marker:
        context.source.unread(marker)


def call_object(context: Context, keys: CallKeys, stops: Markers = NO_STOPS) -> Step[CallEnd]:
    """Reads one ``{"name": …, "arguments": …}``, the members in any order.

    The call begins when its name is known and its arguments begin. They stream as the model writes them; arguments before the name
    are held until it comes, arguments in a JSON string are decoded once, absent ones are ``{}``.
    """
    source, sink = context.source, context.sink
    if not (yield from source.literal("{")):
        return CallEnd.CUT if source.cut_off else CallEnd.REJECTED
    recording = source.record()
    name = ""
    held: str | None = None
    streamed = False
    more = not (yield from _closes(context))
    while more:
        key = yield from json_string(context)
        if key is None or not (yield from _separator(context, ":")):
            break
        if key in keys.arguments and not streamed and held is None:
            if name and (yield from source.peek()) == "{":
                source.keep(recording)
                sink.start_call(name)
                ended = yield from source.json_value(sink.arguments)
                if ended is not JsonEnd.COMPLETE:
                    return (yield from _raw_rest(context, stops))
                streamed = True
                recording = source.record()
            else:
                held = yield from json_text(context)
                if held is None:
                    break
        elif key in keys.name and not name:
            name = (yield from json_string(context)) or ""
            if not name:
                break
        elif (keys.strict and not streamed and key not in (*keys.name, *keys.arguments, *keys.ignored)) or (
            yield from json_text(context)
        ) is None:
            break
        more = yield from _separator(context, ",")
        if not more and not (yield from source.literal("}")):
            break
    else:
        if streamed:
            source.keep(recording)
            sink.end_call()
            return CallEnd.CALLED
        if name and (held is not None or not keys.strict):
            source.keep(recording)
            sink.start_call(name)
            sink.arguments(decoded_arguments(held))
            sink.end_call()
            return CallEnd.CALLED
    if source.cut_off:
        source.keep(recording)
        return CallEnd.CUT
    if streamed:
        source.rewind(recording)
        return (yield from _after_arguments(context, stops))
    source.rewind(recording)
    source.unread("{")
    return CallEnd.REJECTED


def call_or_array(context: Context, keys: CallKeys, stops: Markers = NO_STOPS) -> Step[CallEnd]:
    """Reads one call, or an array of them, whichever stands here."""
    is_array = (yield from context.source.peek()) == "["
    return (yield from (call_array if is_array else call_object)(context, keys, stops))


def named_call(context: Context, name: str, stops: Markers, call_id: str = "") -> Step[None]:
    """Reads the arguments of a call whose name stood before them: a JSON object, or else raw text up to the next stop."""
    source, sink = context.source, context.sink
    sink.start_call(name, call_id)
    yield from source.skip_space()
    if (yield from at_marker(context, stops)) or (source.exhausted and not source.cut_off):
        sink.end_call()
    elif (yield from source.peek()) != "{" or (yield from source.json_value(sink.arguments)) is not JsonEnd.COMPLETE:
        yield from _raw_rest(context, stops)
    else:
        sink.end_call()
        recording = source.record()
        if (yield from source.take_while(_BRACES)) and (yield from at_marker(context, stops)):
            source.keep(recording)  # one brace too many
        else:
            source.rewind(recording)


def _closes(context: Context) -> Step[bool]:
    yield from context.source.skip_space()
    return (yield from context.source.literal("}"))


def _separator(context: Context, character: str) -> Step[bool]:
    yield from context.source.skip_space()
    found = yield from context.source.literal(character)
    if found:
        yield from context.source.skip_space()
    return found


def _after_arguments(context: Context, stops: Markers) -> Step[CallEnd]:
    """The arguments are whole, but the object does not go on as it should. A missing brace is forgiven, other text is not lost."""
    source, sink = context.source, context.sink
    yield from source.skip_space()
    if source.cut_off:
        return CallEnd.CUT
    if source.exhausted or (yield from at_marker(context, stops)):
        sink.end_call()
        return CallEnd.BROKEN
    return (yield from _raw_rest(context, stops))


def _raw_rest(context: Context, stops: Markers) -> Step[CallEnd]:
    """What is no JSON inside a call goes out as it is, up to the next stop, so that nobody takes the arguments for whole."""
    source, sink = context.source, context.sink
    if source.exhausted:
        return CallEnd.CUT
    rest: list[str] = []
    marker = yield from source.until(stops, rest.append, in_call=True)
    sink.arguments("".join(rest).rstrip())
    if marker:
        source.unread(marker)
    elif source.cut_off:
        return CallEnd.CUT
    sink.end_call()
    return CallEnd.BROKEN


def at_marker(context: Context, choices: Markers) -> Step[bool]:
    """Whether one of the markers stands here; it stays unread."""
    marker = yield from context.source.one_of(choices)
    if marker:
        context.source.unread(marker)
    return marker is not None


def json_text(context: Context) -> Step[str | None]:
    """Reads one JSON value; ``None`` if it is invalid or cut (what was read of it is read)."""
    parts: list[str] = []
    ended = yield from context.source.json_value(parts.append)
    return "".join(parts) if ended is JsonEnd.COMPLETE else None


def json_string(context: Context) -> Step[str | None]:
    """Reads one JSON string; ``None`` if there is none."""
    if (yield from context.source.peek()) != '"':
        return None
    text = yield from json_text(context)
    return None if text is None else string(text)


def decoded_arguments(text: str | None) -> str:
    """Arguments as JSON text: those in a JSON string are decoded once, ``null`` and the empty string are none."""
    if text is None or text == "null":
        return ""
    return string(text).strip() if text.startswith('"') else text
