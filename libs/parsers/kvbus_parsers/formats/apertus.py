"""Apertus: objects with one member, whose key is the tool and whose value is the arguments. They may stand amid the thoughts."""

from kvbus_parsers.grammar import Context, ReasoningFormat, ToolFormat
from kvbus_parsers.json_calls import at_marker, broken_rest, decoded_arguments, json_string, json_text, named_call
from kvbus_parsers.source import Step, markers

_OPENER, _CLOSER = "<|tools_prefix|>", "<|tools_suffix|>"
_STOPS = markers(_OPENER, _CLOSER)
_CLOSING = markers(_CLOSER)


def _read(context: Context, opener: str) -> Step[bool]:
    source, sink = context.source, context.sink
    recording = source.record()
    yield from source.literal(opener)  # twice
    if not (yield from source.ahead("[")):
        return source.dismiss(recording)
    source.keep(recording)
    thinks = sink.in_reasoning
    yield from source.literal("[")
    yield from source.skip_space()
    while (name := (yield from _name(context))) is not None:
        yield from _arguments(context, name)
        yield from source.skip_space()
        yield from source.literal("}")
        yield from source.skip_space()
        if not (yield from source.literal(",")):
            break
        yield from source.skip_space()
    yield from source.literal("]")
    yield from source.skip_space()
    if not ((yield from at_marker(context, _STOPS)) or source.exhausted):
        yield from broken_rest(context, _STOPS)
    yield from source.one_of(_CLOSING)
    sink.marker()
    if thinks:
        sink.open_reasoning()
    return True


def _name(context: Context) -> Step[str | None]:
    """Reads ``{"NAME":``, or ``"NAME":`` for a further member of one object. None, with everything given back, if it is neither."""
    source = context.source
    recording = source.record()
    yield from source.literal("{")
    yield from source.skip_space()
    name = yield from json_string(context)
    yield from source.skip_space()
    if not name or not (yield from source.literal(":")):
        source.dismiss(recording)
        return None
    source.keep(recording)
    return name


def _arguments(context: Context, name: str) -> Step[None]:
    """Reads the value of a member. One that is JSON but no object ends by its grammar too, so that no neighbour is taken for it."""
    source, sink = context.source, context.sink
    yield from source.skip_space()
    recording = source.record()
    text = None if (yield from source.peek()) == "{" else (yield from json_text(context))
    if text is None or source.cut_off:
        source.rewind(recording)
        yield from named_call(context, name, _STOPS)
        return
    source.keep(recording)
    sink.start_call(name)
    sink.arguments(decoded_arguments(text))
    sink.end_call()


FORMATS = (ToolFormat("apertus", (_OPENER,), _read, strays=(_CLOSER,)),)
ALIASES = {"apertus2509": "apertus"}
REASONING = (ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), ends_on_tool_opener=True),)
REASONING_ALIASES = ALIASES
