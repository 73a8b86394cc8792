"""Kimi K2: calls as JSON, their names in their ids.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.NAME:IDX<|tool_call_argument_begin|>{…}<|tool_call_end|>…
    <|tool_calls_section_end|>

The index counts over the whole conversation, so the id stays as the model wrote it. Models also write ids without the prefix, the
colon or the name. A name that the id does not tell is that of the tool whose parameters fit the arguments; else there is no call.
"""

import re
from collections.abc import Mapping

from kvbus_parsers import json_text, markup
from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import named_call
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.source import Step, markers

_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL_ENDS = markers(_CALL_END, _CALL, *_SECTIONS, *_SECTION_ENDS)
_ID_ENDS = markers(_ARGUMENTS, _CALL_END, _CALL, *_SECTIONS, *_SECTION_ENDS)
_ID = re.compile(r"(?P<prefix>functions\.)?(?P<name>[^\s:]+(?::[^\s:]+)*?)(?P<index>:\d+)?")
_TRAILING_NUMBER = re.compile(r"[_:]?\d+\Z")


def _read_call(context: Context, _: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    header, stop = yield from source.take_until(_ID_ENDS)
    call_id = header.strip()
    name = _name(call_id, context.schemas)
    if stop != _ARGUMENTS and not (stop == _CALL_END and name):
        return source.dismiss(recording)
    source.keep(recording)
    if stop == _CALL_END:
        source.unread(stop)
    if name:
        yield from named_call(context, name, _CALL_ENDS, call_id)
    else:
        yield from _nameless_call(context, call_id)
    return True


def _name(call_id: str, schemas: Mapping[str, object]) -> str | None:
    """The tool that an id names, offered or not; ``None`` if it names none."""
    if call_id in schemas:
        return call_id
    parts = _ID.fullmatch(call_id)
    if parts is None:
        return None
    name = parts["name"]
    unnumbered = _TRAILING_NUMBER.sub("", name)
    for known in (name, unnumbered, name.removeprefix("functions"), unnumbered.removeprefix("functions")):
        if known in schemas:
            return known
    is_regular = (parts["prefix"] or parts["index"]) and name and not name.isdecimal()
    return name if is_regular else None


def _nameless_call(context: Context, call_id: str) -> Step[None]:
    source, sink = context.source, context.sink
    yield from source.skip_space()
    parts: list[str] = []
    ended = yield from source.json_value(parts.append)
    if ended is JsonEnd.INVALID:
        stop = yield from source.until(_CALL_ENDS, parts.append, in_call=True)
        source.unread(stop or "")
    arguments = "".join(parts)
    name = _tool_of(arguments, context.schemas) if ended is JsonEnd.COMPLETE else None
    if name:
        sink.start_call(name, call_id)
        sink.arguments(arguments)
        sink.end_call()
    elif not source.cut_off:
        sink.prose(arguments or call_id)


def _tool_of(arguments: str, schemas: Mapping[str, object]) -> str | None:
    """The only tool that has all these arguments, none of its required ones missing."""
    keys = json_text.keys(arguments)
    if keys is None:
        return None
    fitting = [name for name, node in schemas.items() if Schema.of(node).fits(keys)]
    return fitting[0] if len(fitting) == 1 else None


_SECTION = markup.Section(_SECTIONS, _SECTION_ENDS, (_CALL,), _read_call, (_ARGUMENTS, _CALL_END))


def _read(context: Context, opener: str) -> Step[bool]:
    return (yield from (_read_call if opener == _CALL else _SECTION.read)(context, opener))


FORMATS = (ToolFormat("kimi_k2", (*_SECTIONS, _CALL), _read, strays=(*_SECTION_ENDS, *_SECTION.strays)),)

ALIASES = {"kimi": "kimi_k2", "kimi_k25": "kimi_k2", "kimik2": "kimi_k2"}
