"""Output of an engine that was made to write a call in another form than the model's, because the request demands a call."""

import json
from collections.abc import Iterable

from kvbus_parsers.grammar import Context, Grammar
from kvbus_parsers.json_calls import NO_STOPS, CallEnd, CallKeys, call_array
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.source import Step, markers

ARRAY = "guided_array"
ARGUMENTS = "guided_arguments:"
TEXT = "guided_text:"

_KEYS = CallKeys(arguments=("parameters", "arguments"))


def grammar(calls: str, openers: Iterable[str] = ()) -> Grammar | None:
    """The grammar of guided output for a mode of calls; ``None`` if the mode is not a guided one.

    ``openers``: what begins a call in the model's own form, or a thought: neither is read here.
    """
    if calls == ARRAY:
        return _array
    if calls.startswith(ARGUMENTS):
        return _arguments(calls.removeprefix(ARGUMENTS))
    if calls.startswith(TEXT):
        key, _, name = calls.removeprefix(TEXT).partition(":")
        return _text(key, name, tuple(openers))
    return None


def _array(context: Context) -> Step[bool]:
    source = context.source
    space = yield from source.skip_space()
    ended = yield from call_array(context, _KEYS)
    if ended is CallEnd.REJECTED:
        source.unread(space)
    return ended is not CallEnd.REJECTED


def _arguments(name: str) -> Grammar:
    def read(context: Context) -> Step[bool]:
        source, sink = context.source, context.sink
        if not (yield from source.ahead("{")):
            return False
        sink.start_call(name)
        ended = yield from source.json_value(sink.arguments)
        if ended is JsonEnd.INVALID:
            yield from source.until(NO_STOPS, sink.arguments)
        if ended is JsonEnd.COMPLETE or not source.cut_off:
            sink.end_call()
        return True

    return read


def _text(key: str, name: str, openers: tuple[str, ...]) -> Grammar:
    """The whole content is one argument, as it is: it goes out as a JSON string that is written on the way."""
    own = markers(*openers)

    def read(context: Context) -> Step[bool]:
        source, sink = context.source, context.sink
        space = yield from source.skip_space()
        opener = yield from source.one_of(own)
        if opener is not None or not (yield from source.peek()):
            source.unread(space + (opener or ""))
            return False
        sink.start_call(name)
        sink.arguments(f'{{{json.dumps(key, ensure_ascii=False)}: "')
        yield from source.until(NO_STOPS, lambda text: sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
        if not source.cut_off:
            sink.arguments('"}')
            sink.end_call()
        return True

    return read
