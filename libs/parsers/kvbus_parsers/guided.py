"""Output of an engine that was made to write JSON calls, because the request demands a call."""

from kvbus_parsers.grammar import Context, Grammar
from kvbus_parsers.json_calls import NO_STOPS, CallEnd, CallKeys, call_array
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.source import Step

ARRAY = "guided_array"
ARGUMENTS = "guided_arguments:"

_KEYS = CallKeys(arguments=("parameters", "arguments"))


def grammar(calls: str) -> Grammar | None:
    """The grammar of guided output for a mode of calls; ``None`` if the mode is not a guided one."""
    if calls == ARRAY:
        return _array
    if calls.startswith(ARGUMENTS):
        return _arguments(calls.removeprefix(ARGUMENTS))
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
