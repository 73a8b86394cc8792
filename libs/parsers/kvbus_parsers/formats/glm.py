"""GLM's tags: a name, then keys and values in turns. Ling, Poolside, Hunyuan 3 and K2 Horizon spell the same.

    <tool_call>NAME⏎<arg_key>KEY</arg_key>⏎<arg_value>VALUE</arg_value>⏎…</tool_call>

Values are verbatim; newlines between tags come and go with the version. Hunyuan 3 has ``<tool_sep>`` behind the name, and a token
suffix on every tag. K2 Horizon's tags begin with ``ifm|``; it may say the type of a value, and may write a call as JSON.
"""

import re
from dataclasses import dataclass

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context, ReasoningFormat, ToolFormat
from kvbus_parsers.json_calls import CallEnd, CallKeys, call_object
from kvbus_parsers.source import Step, markers

_NAME = re.compile(r"""[^\s<>{}"]*+""")
_TYPE = re.compile(r"\w*")


class _Tags:
    def __init__(self, prefix: str = "", suffix: str = "") -> None:
        def tag(name: str) -> tuple[str, str]:
            return f"<{prefix}{name}{suffix}>", f"</{prefix}{name}{suffix}>"

        self.call, self.call_end = tag("tool_call")
        self.calls, self.calls_end = tag("tool_calls")
        self.key, self.key_end = tag("arg_key")
        self.type, self.type_end = tag("arg_type")
        self.value, self.value_end = tag("arg_value")
        self.separator, _ = tag("tool_sep")


@dataclass(frozen=True, slots=True)
class _KeysAndValues:
    tags: _Tags

    def read_call(self, context: Context, _: str) -> Step[bool]:
        source, tags = context.source, self.tags
        after_name = markers(tags.key, tags.separator, tags.call_end)
        recording = source.record()
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            ended = yield from call_object(context, CallKeys(), markers(tags.call_end, tags.call))
            if ended is not CallEnd.REJECTED:
                source.keep(recording)
                return True
        name = yield from source.take_while(_NAME)
        yield from source.skip_space()
        tag = yield from source.one_of(after_name)
        if tag is None or not name:
            is_markup = tag == tags.call_end or (yield from markup.cut_off(context, after_name))
            if is_markup:
                source.keep(recording)
                context.sink.marker()
            else:
                source.rewind(recording)
            return is_markup
        source.keep(recording)
        source.unread(tag)
        yield from self._arguments(context, ArgumentWriter(context, name))
        return True

    def _arguments(self, context: Context, writer: ArgumentWriter) -> Step[None]:
        source, tags = context.source, self.tags
        inside = markers(tags.key, tags.separator, tags.value_end, tags.call, tags.call_end, tags.calls_end)
        typed = False
        while True:
            tag = yield from source.until(inside, writer.raw, in_call=True)
            if tag == tags.key:
                typed |= yield from self._argument(context, writer)
            elif tag not in (tags.separator, tags.value_end):
                break
        if tag is not None:
            writer.close(written=not typed)
            if tag != tags.call_end:
                source.unread(tag)

    def _argument(self, context: Context, writer: ArgumentWriter) -> Step[bool]:
        """Reads behind the opener of a key. Returns whether the model wrote a type."""
        source, tags = context.source, self.tags
        key, stop = yield from source.take_until(markers(tags.key_end))
        yield from source.skip_space()
        type_name = ""
        if (yield from source.literal(tags.type)):
            type_ends = markers(tags.type_end, tags.value, tags.key, tags.call, tags.call_end, tags.calls_end)
            type_name, end = yield from source.take_until(type_ends)
            source.unread("" if end in (None, tags.type_end) else end)
            yield from source.skip_space()
        if stop and (yield from source.literal(tags.value)):
            key = key.strip()
            ends: markup.Ends = {tags.value_end: None, tags.call_end: markers(tags.call, tags.calls_end)}
            schema = _typed(writer.schema.member(key), type_name)
            stop = yield from markup.argument(context, writer, key, ends, schema=schema)
            if stop == tags.call_end:
                source.unread(stop)
        elif not (yield from markup.cut_off(context, markers(tags.value, tags.type))):
            writer.raw(f"{key} {type_name}" if type_name else key)
        return bool(type_name)


def _typed(schema: Schema, written: str) -> Schema:
    """What the model says about the type (``array[string]``) decides where the tool's schema leaves it open."""
    base = _TYPE.match(written.strip())
    said = Schema.of({"type": base[0]}) if base else Schema()
    return said if said.types and (not schema.types or said.types == {"string"} < schema.types) else schema


def _format(name: str, *spellings: _Tags, sectioned: bool = False) -> ToolFormat:
    reading: dict[str, markup.CallReader] = {tags.call: _KeysAndValues(tags).read_call for tags in spellings}
    for tags in spellings if sectioned else ():
        read_call = reading[tags.call]
        reading[tags.calls] = markup.Section(
            (tags.calls,), (tags.calls_end,), (tags.call,), read_call, (tags.call_end,)
        ).read
    strays = tuple(tag for tags in spellings for tag in (tags.call_end, *((tags.calls_end,) if sectioned else ())))

    def read(context: Context, opener: str) -> Step[bool]:
        return (yield from reading[opener](context, opener))

    return ToolFormat(name, tuple(reading), read, strays=strays)


FORMATS = (
    _format("glm47", _Tags()),
    _format("hy_v3", _Tags(), _Tags(suffix=":opensource"), sectioned=True),
    _format("k2_horizon", _Tags(prefix="ifm|"), sectioned=True),
)

ALIASES = {
    "glm": "glm47",
    "glm45": "glm47",
    "glm45_moe": "glm47",
    "glm46": "glm47",
    "glm47_moe": "glm47",
    "glm4_moe": "glm47",
    "glm5": "glm47",
    "ling3": "glm47",
    "poolside_v1": "glm47",
    "spark25": "glm47",
    "hunyuan": "hy_v3",
}

REASONING = (
    ReasoningFormat(
        "k2_horizon",
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        starts_open=True,
        ends_on_tool_opener=True,
    ),
)
