"""DeepSeek's DSML: V3.2, V4 and V4.1, which differ in the name of the block and in spaces. GigaChat 3.5 says GCML.

    <｜DSML｜tool_calls>⏎<｜DSML｜invoke name="NAME">⏎<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>⏎
    </｜DSML｜invoke>⏎</｜DSML｜tool_calls>

``string="true"`` is verbatim text whatever the tool's schema says; else a value is JSON, or text if it is none. A call may also
hold one JSON object in place of parameters; a single parameter ``arguments`` or ``input`` that the tool lacks is that object.
"""

from kvbus_parsers import json_text, markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.coercion import Schema
from kvbus_parsers.formats.invoke import InvokeTags
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import at_marker
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.source import Step, markers

_BLOCKS = ("function_calls", "tool_calls", "toolcalls", "tool", "calls")
_WRAPPERS = ("arguments", "input")


def _tags(prefix: str, name: str, end: str = "") -> tuple[str, ...]:
    return f"｜{prefix}｜{name}{end}", f"｜{prefix}｜ {name}{end}"


def _start(prefix: str, name: str) -> tuple[str, ...]:
    return tuple(f"<{tag}" for tag in _tags(prefix, name))


def _end(prefix: str, name: str) -> tuple[str, ...]:
    return tuple(f"</{tag}>" for tag in _tags(prefix, name))


class _DsmlTags(InvokeTags):
    def read_body(self, context: Context, writer: ArgumentWriter) -> Step[None]:
        source = context.source
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            ended = yield from source.json_value(context.sink.arguments)
            if ended is JsonEnd.CUT:
                return
        yield from super().read_body(context, writer)

    def close(self, writer: ArgumentWriter) -> None:
        writer.close(written=False)  # the types are on the wire

    def read_value(self, context: Context, writer: ArgumentWriter, tag: markup.Tag) -> Step[str | None]:
        key = tag.attributes["name"]
        is_string = tag.attributes.get("string", "").lower() == "true"
        may_wrap = key in _WRAPPERS and writer.is_empty and writer.schema.is_known and not writer.schema.declares(key)
        if is_string and not may_wrap:
            return (yield from markup.argument(context, writer, key, self.ends, schema=Schema()))
        parts: list[str] = []
        stop = yield from markup.value(context, parts.append, self.ends)
        text = "".join(parts)
        if stop is None:
            writer.member(key, text)
            return None
        if may_wrap and _wraps(text, writer.schema):
            yield from context.source.skip_space()
            if (yield from at_marker(context, markers(*self.closes))):
                writer.raw(text)
                return stop
        if is_string:
            writer.member(key, json_text.quote(text))
        elif json_text.is_json(text):
            writer.member(key, text.strip())
        else:
            writer.member(key, writer.schema.member(key).to_json(text))
        return stop


def _wraps(text: str, schema: Schema) -> bool:
    """Whether this is an object with nothing but arguments of the tool."""
    keys = json_text.keys(text)
    return keys is not None and all(map(schema.declares, keys))


def _format(name: str, prefix: str) -> ToolFormat:
    openers = tuple(f"<{tag}" for block in _BLOCKS for tag in _tags(prefix, block, ">"))
    closers = tuple(tag for block in _BLOCKS for tag in _end(prefix, block))
    calls = _DsmlTags(
        _start(prefix, "invoke"),
        _end(prefix, "invoke"),
        _start(prefix, "parameter"),
        _end(prefix, "parameter"),
        closers,
    )
    section = markup.Section(openers, closers, calls.opens, calls.read_call, (*calls.closes, *calls.parameter_closes))

    def read(context: Context, opener: str) -> Step[bool]:
        return (yield from (section.read if opener in openers else calls.read_call)(context, opener))

    return ToolFormat(name, (*openers, *calls.opens), read, strays=closers + section.strays)


FORMATS = (_format("deepseek_v3_2", "DSML"), _format("gigachat35", "GCML"))

ALIASES = {
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v3_2",
    "deepseek_v41": "deepseek_v3_2",
    "deepseek_v4_1": "deepseek_v3_2",
    "deepseekv32": "deepseek_v3_2",
    "deepseekv4": "deepseek_v3_2",
    "deepseekv41": "deepseek_v3_2",
}
