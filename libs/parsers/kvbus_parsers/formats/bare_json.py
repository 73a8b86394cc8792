"""Calls as bare JSON at the start of the content: Llama 3's objects, xLAM's array.

Nothing marks them, so only what is a call and nothing else is one: a JSON answer is text.
"""

import re

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import CallEnd, CallKeys, broken_rest, call_array, call_or_array
from kvbus_parsers.source import Step, markers

_STRICT = CallKeys(strict=True)

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_TAGS = markers(_PYTHON_TAG)
_SEPARATORS = re.compile(r"[;,\s]*+")

_FENCE = "```"
_XLAM_OPENERS = (f"{_FENCE}json", _FENCE, "[TOOL_CALLS]", "<tool_call>", "</think>")
_XLAM_CLOSERS = markers(_FENCE, "[/TOOL_CALLS]", "</tool_call>")


def _objects(context: Context) -> Step[bool]:
    """``{call}; {call}``. False, with everything given back, if none begins here."""
    source = context.source
    called = False
    space = yield from source.skip_space()
    while True:
        ended = yield from call_or_array(context, _STRICT, _PYTHON_TAGS)
        if ended is CallEnd.REJECTED:
            source.unread(space)
            return called
        called = True
        if ended is not CallEnd.CALLED:
            return True
        context.sink.marker()
        space = yield from source.take_while(_SEPARATORS)


def _python_tag(context: Context, opener: str) -> Step[bool]:
    yield from context.source.one_of(_PYTHON_TAGS)  # twice
    if (yield from _objects(context)):
        return True
    if not (yield from context.source.ahead("{[")):
        return context.source.cut_off
    context.sink.marker()
    yield from broken_rest(context, _PYTHON_TAGS)
    return True


def _array(context: Context) -> Step[bool]:
    source = context.source
    space = yield from source.skip_space()
    if (yield from call_array(context, _STRICT, _XLAM_CLOSERS)) is CallEnd.REJECTED:
        source.unread(space)
        return False
    space = yield from source.skip_space()
    if not (yield from source.one_of(_XLAM_CLOSERS)):
        source.unread(space)
    context.sink.marker()
    return True


def _xlam(context: Context, opener: str) -> Step[bool]:
    return (yield from _array(context))


FORMATS = (
    ToolFormat("llama3_json", (_PYTHON_TAG,), _python_tag, leading=_objects),
    ToolFormat("xlam", _XLAM_OPENERS, _xlam, leading=_array),
)
ALIASES = {"llama3": "llama3_json", "llama4_json": "llama3_json", "llama": "llama3_json"}
