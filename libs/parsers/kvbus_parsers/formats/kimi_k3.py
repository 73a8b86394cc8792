"""Kimi K3: channels and calls between tags that are made of special tokens. Every argument says its type.

<|open|>think<|sep|>…<|close|>think<|sep|><|open|>response<|sep|>…<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
"""

import re

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context, ReasoningFormat, ToolFormat
from kvbus_parsers.source import Step, markers

_SEPARATOR = "<|sep|>"


def _open(channel: str) -> str:
    return f"<|open|>{channel}{_SEPARATOR}"


def _close(channel: str) -> str:
    return f"<|close|>{channel}{_SEPARATOR}"


_CALL, _ARGUMENT = "<|open|>call ", "<|open|>argument "
_CALL_END, _ARGUMENT_END, _TOOLS_END = _close("call"), _close("argument"), _close("tools")
_IN_CALL = markers(_ARGUMENT, _ARGUMENT_END, _CALL_END, _TOOLS_END, _CALL)
_VALUE_ENDS: markup.Ends = {_ARGUMENT_END: None, _CALL_END: markers(_CALL, _TOOLS_END)}
_HEAD_ENDS = markers(_SEPARATOR, "<|open|>", "<|close|>")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_HEAD_LENGTH_MAX = 512


def _call(context: Context, opener: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    attributes, _ = yield from _head(context)
    name = attributes.get("tool")
    if not name:
        return source.dismiss(recording)
    source.keep(recording)
    writer = ArgumentWriter(context, name)
    while (tag := (yield from source.until(_IN_CALL, writer.raw, in_call=True))) in (_ARGUMENT, _ARGUMENT_END):
        if tag == _ARGUMENT:
            yield from _argument(context, writer)
    if tag is not None:
        writer.close(written=False)
        if tag != _CALL_END:
            source.unread(tag)
    return True


def _argument(context: Context, writer: ArgumentWriter) -> Step[None]:
    attributes, head = yield from _head(context)
    key = attributes.get("key")
    if key is None:
        if not context.source.cut_off:
            writer.raw(head)
        return
    said = Schema.of({"type": attributes.get("type")})
    schema = said if said.types else writer.schema.member(key)
    if (yield from markup.argument(context, writer, key, _VALUE_ENDS, schema=schema)) == _CALL_END:
        context.source.unread(_CALL_END)


def _head(context: Context) -> Step[tuple[dict[str, str], str]]:
    """Reads the rest of a tag: its attributes, none if it is no whole tag, and its text."""
    head, end = yield from context.source.take_until(_HEAD_ENDS, _HEAD_LENGTH_MAX)
    if end != _SEPARATOR:
        context.source.unread(end or "")
        return {}, head
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(head)}, head


_SECTION = markup.Section((_open("tools"),), (_TOOLS_END,), (_CALL,), _call, strays=(_CALL_END,))

_REASONING = ReasoningFormat(
    "kimi_k3",
    (_open("think"),),
    # A response shows that the thoughts are over, even where the model did not close them.
    (_close("think"), _open("response")),
    starts_open=True,
    ends_on_tool_opener=True,
    framing=(_open("response"), _close("response"), _open("message"), _close("message"), "<|end_of_msg|>"),
)


def _read(context: Context, opener: str) -> Step[bool]:
    return (yield from (_call if opener == _CALL else _SECTION.read)(context, opener))


FORMATS = (ToolFormat("kimi_k3", (_open("tools"), _CALL), _read, strays=(_CALL_END, _TOOLS_END), reasoning=_REASONING),)
REASONING = (_REASONING,)
