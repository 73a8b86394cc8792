"""DeepSeek V3, R1 and V3.1: calls between special tokens. V3.2 and later write markup instead.

V3 writes ``function<sep>NAME`` and the arguments in a fence, V3.1 ``NAME<sep>{…}``. Both are read under either name.
"""

import re

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import at_marker, named_call
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
_BEHIND_LANGUAGE = '\n\r {["`'
_KIND = "function"  # what V3 writes where V3.1 has the name
_NAME = re.compile(r"[\w.:/-]+")
_NO_NAME = ("[", '"', "'", "(")
_NAME_LENGTH_MAX = 256


def _call(context: Context, opener: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    head, separator = yield from source.take_until(_SEPARATOR, _NAME_LENGTH_MAX)
    head = head.strip()
    if separator != _SEP or not head:
        return source.dismiss(recording)
    name = yield from _name_behind(context, head)
    if name is None:
        return source.dismiss(recording)
    source.keep(recording)
    if head not in (_KIND, name):
        context.sink.prose(head)
    fenced = yield from source.literal(_FENCE)
    if fenced:
        language = yield from source.take_while(_LANGUAGE)
        if (yield from source.peek()) not in _BEHIND_LANGUAGE:
            source.unread(language)
    elif (yield from cut_off(context, markers(_FENCE))):
        return True
    yield from named_call(context, name, _FENCED_STOPS if fenced else _STOPS)
    if fenced and (yield from source.ahead("`")) and not (yield from source.literal(_FENCE)):
        yield from cut_off(context, markers(_FENCE))
    space = yield from source.skip_space()
    if not (yield from source.literal(_CALL_END)):
        source.unread(space)
    return True


def _name_behind(context: Context, head: str) -> Step[str | None]:
    """The name of the call, read on the way if it stands behind the separator. ``head``: what stands before it.

    V3 has the kind of tool for a head, and V3.1 the name, behind which all is arguments, even where they are no object. Any other
    head shows by what follows: the name of an offered tool, or a word and a fence. ``None``: this does not become a call.
    """
    source = context.source
    yield from source.skip_space()
    if (yield from source.peek()) == "{":
        return head
    recording = source.record()
    text, end = yield from source.take_until(_NAME_ENDS, _NAME_LENGTH_MAX)
    if end is None and source.cut_off:
        text = text[: _NAME_ENDS.find(text, 0, final=False)[0]]  # without half a marker
    text = text.strip()
    if end != "\n":
        source.unread(end or "")
    yield from source.skip_space()
    if head == _KIND:
        is_name = end is not None and not text.startswith(_NO_NAME)
        is_open = end is None
    else:
        may_be_name = head not in context.schemas and _NAME.fullmatch(text) is not None
        is_name = may_be_name and (text in context.schemas or (yield from at_marker(context, markers(_FENCE))))
        is_open = may_be_name and not is_name and (yield from cut_off(context, markers(_FENCE)))
    if is_name or is_open:
        source.keep(recording)
        return None if is_open else text or head
    source.rewind(recording)
    return head


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
