"""Formats that write calls as JSON behind a marker: Hermes and its many relatives."""

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import CallEnd, CallKeys, broken_rest, call_array, call_object
from kvbus_parsers.source import Step, markers


def json_tags(name: str, openers: tuple[str, ...], closers: tuple[str, ...], keys: CallKeys = CallKeys()) -> ToolFormat:  # noqa: B008
    """``OPENER {call} CLOSER`` or ``OPENER [{call}, …] CLOSER``; the JSON ends by its own grammar, the closer may be missing."""
    stops = markers(*openers, *closers)
    opening, closing = markers(*openers), markers(*closers)

    def read(context: Context, opener: str) -> Step[bool]:
        source, sink = context.source, context.sink
        before = source.record()
        yield from source.skip_space()
        while (yield from source.one_of(opening)):  # a doubled opener
            yield from source.skip_space()
        if not (yield from source.ahead("{[")):
            if source.cut_off:
                source.keep(before)
            else:
                source.rewind(before)
            return source.cut_off
        source.keep(before)
        while (yield from source.ahead("{[")):
            is_array = (yield from source.peek()) == "["
            ended = yield from (call_array if is_array else call_object)(context, keys, stops)
            if ended is CallEnd.REJECTED:
                yield from broken_rest(context, stops)
            if ended is not CallEnd.CALLED:
                break
            sink.marker()
            while (yield from source.ahead("}")):  # one brace too many
                yield from source.literal("}")
        space = yield from source.skip_space()
        if not (yield from source.one_of(closing)):
            source.unread(space)
        sink.marker()
        return True

    return ToolFormat(name, openers, read, strays=closers)


FORMATS = (json_tags("hermes", ("<tool_call>",), ("</tool_call>",)),)

ALIASES = {"qwen25": "hermes", "qwen": "hermes", "qwen3_json": "hermes", "granite4": "hermes"}
