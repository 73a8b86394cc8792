"""MiniMax M3: arguments as nested elements, and a namespace token in front of every tag.

    ]<]minimax[>[<tool_call>⏎]<]minimax[>[<invoke name="NAME">⏎]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>⏎
    ]<]minimax[>[</invoke>⏎]<]minimax[>[</tool_call>

Members of an object are elements named after their keys, those of an array are called ``item``. Where there is an array the tool's
schema says; elsewhere a repeated name makes a list. Text beside elements becomes the member ``$text``.
"""

from collections.abc import Sequence

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import at_marker
from kvbus_parsers.json_text import quote
from kvbus_parsers.source import Source, Step, markers

_NAMESPACE = "]<]minimax[>["
_NAMESPACES = markers(_NAMESPACE)
_CALLS, _CALLS_END = "<tool_call>", "</tool_call>"
_INVOKE, _INVOKE_END = "<invoke ", "</invoke>"
_OUTER = markers(_CALLS, _CALLS_END, _INVOKE, _INVOKE_END)
_CLOSE, _OPEN = "</", "<"
_IN_CALL = markers(_CALLS, _CALLS_END, _INVOKE, _INVOKE_END, _CLOSE, _OPEN)
_TAG_END = markers(">")
_DEPTH_MAX = 64


def _read(context: Context, _: str) -> Step[bool]:
    """Reads behind the namespace token. The tags around calls say nothing: each call has its own."""
    source = context.source
    recording = source.record()
    yield from source.skip_space()
    tag = yield from source.one_of(_OUTER)
    found = tag is not None or (yield from markup.cut_off(context, _OUTER))
    if found and tag == _INVOKE:
        source.unread(" ")
        header = yield from markup.tag_rest(source)
        name = header.attributes.get("name", "").strip() if header else ""
        if not name:
            return source.dismiss(recording)
        source.keep(recording)
        yield from _arguments(context, ArgumentWriter(context, name))
        return True
    if not found:
        source.rewind(recording)
        return False
    source.keep(recording)
    context.sink.marker()
    return True


def _arguments(context: Context, writer: ArgumentWriter) -> Step[None]:
    source = context.source
    while (yield from source.until(_NAMESPACES, writer.raw, in_call=True)) is not None:
        yield from source.skip_space()
        tag = yield from source.one_of(_IN_CALL)
        if tag is None:
            writer.raw(_NAMESPACE)
            continue
        if tag in _OUTER.texts:
            writer.close()
            if tag != _INVOKE_END:
                source.unread(_NAMESPACE + tag)
            return
        name, end = yield from source.take_until(_TAG_END)
        if end is None and not source.cut_off:
            writer.raw(_NAMESPACE + tag + name)
        elif tag == _OPEN:
            yield from _argument(context, writer, name.strip())


def _argument(context: Context, writer: ArgumentWriter, key: str) -> Step[None]:
    source = context.source
    schema = writer.schema.member(key)
    recording = source.record()
    if _is_container(schema) or (schema.types != {"string"} and (yield from _at_element(source))):
        source.rewind(recording)
        recording = source.record()
        value = yield from _value(context, key, schema, 1)
        written = source.recorded(recording)
        source.keep(recording)
        if value is None:
            writer.member(key, written)
        else:
            writer.member(key, value, written.rpartition(_NAMESPACE)[0] if written.endswith(f"</{key}>") else written)
        return
    source.rewind(recording)
    writer.begin(key)
    while (yield from source.until(_NAMESPACES, writer.text, in_call=True)) is not None:
        if (yield from _ends(context, key)):
            writer.end()
            return
        writer.text(_NAMESPACE)
    writer.abandon()


def _at_element(source: Source) -> Step[bool]:
    """Whether the next thing is the start of an element. Reads on the way."""
    yield from source.skip_space()
    if not (yield from source.literal(_NAMESPACE)):
        return False
    yield from source.skip_space()
    return (yield from source.one_of(_IN_CALL)) == _OPEN


def _ends(context: Context, tag: str) -> Step[bool]:
    """Behind a namespace token: reads the end of the element. The end of the call ends it too, and stays unread."""
    source = context.source
    space = yield from source.skip_space()
    if (yield from source.literal(f"</{tag}>")):
        return True
    if (yield from at_marker(context, _OUTER)):
        source.unread(_NAMESPACE)
        return True
    source.unread(space)
    return False


def _value(context: Context, tag: str, schema: Schema, depth: int) -> Step[str | None]:
    """Reads the content of an element up to its end. Returns it as JSON, ``None`` where the output ends before."""
    source = context.source
    text: list[str] = []
    members: list[tuple[str, str]] = []
    while (yield from source.until(_NAMESPACES, text.append, in_call=True)) is not None:
        if (yield from _ends(context, tag)):
            return _json(schema, "".join(text), members)
        space = yield from source.skip_space()
        is_element = schema.types != {"string"} and depth < _DEPTH_MAX
        if is_element and (yield from source.peek()) == _OPEN and not (yield from at_marker(context, markers(_CLOSE))):
            name, end = yield from source.take_until(_TAG_END)
            if end is None:
                text.append(_NAMESPACE + name)
                continue
            child = name.removeprefix(_OPEN).strip()
            is_item = child == "item" and "array" in schema.types
            child_schema = schema.item(len(members)) if is_item else schema.member(child)
            value = yield from _value(context, child, child_schema, depth + 1)
            if value is None:
                return None
            members.append((child, value))
        else:
            text.append(_NAMESPACE + space)
    return None


def _is_container(schema: Schema) -> bool:
    return bool(schema.types & {"object", "array"}) and "string" not in schema.types


def _json(schema: Schema, text: str, members: Sequence[tuple[str, str]]) -> str:
    is_blank = not text.strip()
    is_empty = not members and is_blank and _is_container(schema)
    if "array" in schema.types and (members or is_empty):
        return "[" + ", ".join([value for _, value in members] + ([] if is_blank else [quote(text.strip())])) + "]"
    if not members and not is_empty:
        return schema.to_json(text)
    named: dict[str, list[str]] = {}
    for name, value in members:
        named.setdefault(name, []).append(value)
    if not is_blank:
        named.setdefault("$text", []).append(quote(text.strip()))
    return "{" + ", ".join(f"{quote(name)}: {_one_or_list(values)}" for name, values in named.items()) + "}"


def _one_or_list(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"


FORMATS = (ToolFormat("minimax_m3", (_NAMESPACE,), _read),)
