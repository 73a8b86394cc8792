"""Formats that write calls as Python does: a bare list, a list or lines between markers.

A bare ``[`` begins calls only where a call's whole head follows, ``name(argument=`` or ``name()``, and inside prose only when the
tool is one of those that were offered. Between markers a name and a parenthesis are enough.
"""

import re
from collections.abc import Callable

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import NO_STOPS, CallEnd, CallKeys, at_marker, call_or_array
from kvbus_parsers.python_calls import NAME, arguments, single_equals
from kvbus_parsers.source import Markers, Step, markers

_SEPARATORS = re.compile(r"[,\s]*+")
_SEPARATORS_BETWEEN_MARKERS = re.compile(r"[,;\[\]\s]*+")
_KEYS = CallKeys()


def _head(context: Context, *, strict: bool, offered: bool = False) -> Step[str | None]:
    """Reads ``name(``; None, with everything given back, if that is no call. A name that the end of the output cuts stays read."""
    source = context.source
    recording = source.record()
    name = yield from source.take_while(NAME)
    yield from source.skip_space()
    is_call = bool(name) and (not offered or name in context.schemas) and (yield from source.literal("("))
    if is_call and strict:
        inner = source.record()
        yield from source.skip_space()
        if (yield from source.literal(")")):
            yield from source.skip_space()
            # [f()](…) is a link.
            is_last = yield from source.literal("]")
            is_call = (yield from source.peek()) != "(" if is_last else (yield from source.peek()) == ","
        else:
            argument = yield from source.take_while(NAME)
            yield from source.skip_space()
            is_call = bool(argument) and (yield from single_equals(source))
        is_call = is_call or (source.cut_off and name in context.schemas)
        source.rewind(inner)
    if is_call:
        source.keep(recording)
        return name
    source.dismiss(recording)
    return None


def _call(context: Context, name: str, ends: Markers = NO_STOPS) -> Step[bool]:
    """Reads a call behind its parenthesis; False when the input ends first."""
    source, sink = context.source, context.sink
    sink.start_call(name)
    complete = yield from arguments(source, sink.arguments, ends)
    if complete:
        sink.end_call()
    return complete


def _list(context: Context, *, offered: bool = False) -> Step[bool]:
    """Reads a list of calls behind its ``[``. False, with everything given back, if it begins otherwise."""
    source, sink = context.source, context.sink
    recording = source.record()
    yield from source.skip_space()
    name = yield from _head(context, strict=True, offered=offered)
    if name is None:
        source.rewind(recording)
        return False
    source.keep(recording)
    while name is not None and (yield from _call(context, name)):
        between = yield from source.take_while(_SEPARATORS)
        if (yield from source.literal("]")):
            break
        name = yield from _head(context, strict=True)
        if name is None and not source.cut_off:
            source.unread(between)
    sink.marker()
    return True


def _leading(context: Context) -> Step[bool]:
    source = context.source
    space = yield from source.skip_space()
    if (yield from source.literal("[")):
        if (yield from _list(context)):
            return True
        source.unread("[")
    source.unread(space)
    return False


def _inside_text(context: Context, opener: str) -> Step[bool]:
    return not context.sink.in_reasoning and (yield from _list(context, offered=True))


def _between(openers: tuple[str, ...], closers: tuple[str, ...]) -> Callable[[Context, str], Step[bool]]:
    """Reads what follows one of the openers: calls in brackets, or on lines of their own, or as JSON."""
    stops, ends, line_ends = markers(*openers, *closers), markers(*closers), markers("\n", *openers, *closers)

    def read(context: Context, opener: str) -> Step[bool]:
        source, sink = context.source, context.sink
        recording = source.record()
        yield from source.skip_space()
        yield from source.literal(opener)  # twice
        if not (yield from _json(context, stops)):
            yield from source.take_while(_SEPARATORS_BETWEEN_MARKERS)
            name = yield from _head(context, strict=False)
            if name is None and not (yield from at_marker(context, ends)):
                return source.dismiss(recording)
            while name is not None:
                if not (yield from _call(context, name, stops)):
                    break
                name = yield from _next(context, stops, line_ends)
        source.keep(recording)
        yield from source.skip_space()
        yield from source.one_of(ends)
        sink.marker()
        return True

    return read


def _json(context: Context, stops: Markers) -> Step[bool]:
    source = context.source
    space = yield from source.skip_space()
    ended = yield from call_or_array(context, _KEYS, stops)
    if ended is CallEnd.REJECTED:
        source.unread(space)
    return ended is not CallEnd.REJECTED


def _next(context: Context, stops: Markers, line_ends: Markers) -> Step[str | None]:
    """The head of the next call between the markers. Lines that are none are prose."""
    source = context.source
    while True:
        yield from source.take_while(_SEPARATORS_BETWEEN_MARKERS)
        name = yield from _head(context, strict=False)
        if name is not None or source.exhausted or (yield from at_marker(context, stops)):
            return name
        end = yield from source.until(line_ends, context.sink.prose)
        source.unread(end or "")


_PYTHON = (("<|python_start|>",), ("<|python_end|>",))
_OLMO3 = (("<function_calls>",), ("</function_calls>",))
_LFM2 = (("<|tool_call_start|>",), ("<|tool_call_end|>",))
_between_python_tokens = _between(*_PYTHON)


def _llama4(context: Context, opener: str) -> Step[bool]:
    return (yield from (_inside_text if opener == "[" else _between_python_tokens)(context, opener))


FORMATS = (
    ToolFormat("pythonic", ("[",), _inside_text, leading=_leading),
    ToolFormat("llama4_pythonic", ("[", *_PYTHON[0]), _llama4, strays=_PYTHON[1], leading=_leading),
    ToolFormat("olmo3", _OLMO3[0], _between(*_OLMO3), strays=_OLMO3[1]),
    ToolFormat("lfm2", _LFM2[0], _between(*_LFM2), strays=_LFM2[1]),
)
