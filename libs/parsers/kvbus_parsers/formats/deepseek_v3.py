"""DeepSeek V3, R1 and V3.1: calls between special tokens. V3.2 and later write markup instead.

V3 writes ``function<sep>NAME`` and the arguments in a fence, V3.1 ``NAME<sep>{…}``. Both are read under either name.
"""

import re

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import named_call
from kvbus_parsers.markup import Section, cut_off
from kvbus_parsers.source import Step, markers

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_FENCE = "```"

_TAGS = (_CALL_BEGIN, _CALL_END, _CALLS_BEGIN, _CALLS_END)
_STOPS = markers(*_TAGS)
_FENCED_STOPS = markers(
    *_TAGS, *(lead + _FENCE + space + tag for tag in _TAGS for lead in ("", "\n") for space in ("", "\n"))
)
_SEPARATOR = markers(_SEP, *_TAGS)
_NAME_ENDS = markers("\n", _FENCE, "{", *_TAGS)
_LANGUAGE = re.compile(r"[a-z]*+")
_NAME_LENGTH_MAX = 256


def _call(context: Context, opener: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    head, separator = yield from source.take_until(_SEPARATOR, _NAME_LENGTH_MAX)
    name = head.strip()
    if separator in _TAGS or not name:
        return source.dismiss(recording)
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        after, end = yield from source.take_until(_NAME_ENDS, _NAME_LENGTH_MAX)
        if end is None:
            return source.dismiss(recording)
        name = after.strip() or name
        source.unread("" if end == "\n" else end)
        yield from source.skip_space()
    source.keep(recording)
    fenced = yield from source.literal(_FENCE)
    if fenced:
        yield from source.take_while(_LANGUAGE)
    elif (yield from cut_off(context, markers(_FENCE))):
        return True
    yield from named_call(context, name, _FENCED_STOPS if fenced else _STOPS)
    if fenced and (yield from source.ahead("`")) and not (yield from source.literal(_FENCE)):
        yield from cut_off(context, markers(_FENCE))
    space = yield from source.skip_space()
    if not (yield from source.literal(_CALL_END)):
        source.unread(space)
    return True


_SECTION = Section((_CALLS_BEGIN,), (_CALLS_END,), (_CALL_BEGIN,), _call, strays=(_CALL_END,))


def _read(context: Context, opener: str) -> Step[bool]:
    if opener == _CALLS_BEGIN and (yield from _SECTION.read(context, opener)):
        return True
    return (yield from _call(context, opener))  # the opener of the section may stand alone


FORMATS = (ToolFormat("deepseek_v3", (_CALLS_BEGIN, _CALL_BEGIN), _read, strays=(_CALL_END, _CALLS_END, _SEP)),)
ALIASES = {
    "deepseek_v3_1": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
}
