"""Solar Open 2: a name on the line of the opener, then arguments between tokens of their own.

    <|tool_call:start|>NAME⏎<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>⏎…<|tool_call:end|>

Values are verbatim. Any of the tokens ends a value whose own end is missing.
"""

import re

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.source import Step, markers

_CALL, _CALL_END = "<|tool_call:start|>", "<|tool_call:end|>"
_KEY, _VALUE, _ARGUMENT_END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"
_NAME = re.compile(r"[^\s<]*+")
_AFTER_NAME = markers(_KEY, _CALL_END, "\n")
_INSIDE = markers(_CALL, _CALL_END, _KEY, _ARGUMENT_END)
_ENDS: markup.Ends = {_ARGUMENT_END: None, _KEY: None, _CALL_END: None, _CALL: None}


def _read(context: Context, opener: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    name = yield from source.take_while(_NAME)
    behind = yield from source.one_of(_AFTER_NAME)
    if not name or behind is None:
        return source.dismiss(recording)
    source.keep(recording)
    source.unread(behind)
    writer = ArgumentWriter(context, name)
    tag = yield from source.until(_INSIDE, writer.raw, in_call=True)
    while tag in (_KEY, _ARGUMENT_END):
        if tag == _KEY:
            key, stop = yield from source.take_until(markers(_VALUE, _CALL_END))
            if stop == _VALUE:
                tag = yield from markup.argument(context, writer, key.strip(), _ENDS)
                continue
            if not source.cut_off:
                writer.raw(key)
                source.unread(stop or "")
        tag = yield from source.until(_INSIDE, writer.raw, in_call=True)
    if tag is not None:
        writer.close()
        if tag != _CALL_END:
            source.unread(tag)
    return True


FORMATS = (ToolFormat("solar_open2", (_CALL,), _read, strays=(_CALL_END, _ARGUMENT_END)),)
