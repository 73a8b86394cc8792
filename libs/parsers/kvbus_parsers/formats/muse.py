"""Muse: messages with recipients. A message to ``self`` is reasoning, one to ``user`` is text, one to a tool holds calls.

    to=self<|message|>…<|eom|><|start|>assistant to=NAME<|message|><atem:function_calls>⏎<atem:invoke name="NAME">⏎
    <atem:parameter name="KEY">VALUE</atem:parameter>⏎</atem:invoke>⏎</atem:function_calls><|eom|>
    <|start|>assistant to=user<|message|>…<|eot|>

The prompt ends behind ``<|start|>assistant``. Calls count only in messages to tools, or where there are no message headers at all.
"""

import re

from kvbus_parsers import markup
from kvbus_parsers.formats.invoke import InvokeTags, tags
from kvbus_parsers.grammar import Context, Grammar, ReasoningFormat, ToolFormat
from kvbus_parsers.source import Step, markers

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_RECIPIENT = re.compile(r"[\w.-]*+")
_NOBODY = "?"  # where there are no headers


class _AtemTags(InvokeTags):
    def tool_name(self, context: Context, written: str) -> str:
        """The template offers a tool without a namespace as ``NAME.*``, and models then call ``NAME.NAME``."""
        namespace, _, name = written.partition(".")
        return name if namespace == name and name in context.schemas and written not in context.schemas else written


_CALLS = _AtemTags(**vars(tags("atem:invoke", "atem:parameter", "</atem:function_calls>")))
_SECTION = markup.Section(("<atem:function_calls>",), ("</atem:function_calls>",), _CALLS.opens, _CALLS.read_call)
_IN_MESSAGE = markers(_START, _MESSAGE, *_ENDS)
_IN_CALLS = markers(_START, _MESSAGE, *_ENDS, *_SECTION.openers, *_SECTION.closers, *_CALLS.opens, *_CALLS.closes)


def _messages(*, calls: bool) -> Grammar:
    """``calls``: whether messages to tools are read as calls."""

    def read(context: Context) -> Step[bool]:
        recipient = yield from _header(context, _NOBODY)
        while (yield from _body(context, recipient, calls=calls)):
            recipient = yield from _header(context, "")
        return True

    return read


def _header(context: Context, default: str) -> Step[str]:
    """Reads a header, and returns the recipient; if there is none, reads nothing and returns the default."""
    source = context.source
    recording = source.record()
    yield from source.skip_space()
    for text in (_START, "assistant"):
        yield from source.literal(text)
        yield from source.skip_space()
    recipient = ""
    if (yield from source.literal("to=")):
        recipient = yield from source.take_while(_RECIPIENT)
        yield from source.skip_space()
    is_header = yield from source.literal(_MESSAGE)
    if is_header or (yield from markup.cut_off(context, markers(_MESSAGE))):
        source.keep(recording)
        context.sink.marker()
        return recipient
    source.rewind(recording)
    return default


def _body(context: Context, recipient: str, *, calls: bool) -> Step[bool]:
    """Reads a message up to the next one; False where the output ends."""
    source, sink = context.source, context.sink
    if recipient == "self":
        sink.open_reasoning()
    elif context.leading:
        yield from context.leading(context)
    stops = _IN_CALLS if calls and recipient not in ("self", "user", "") else _IN_MESSAGE
    while True:
        marker = yield from source.until(stops, sink.prose)
        if marker in (None, _START, *_ENDS):
            sink.close_reasoning()
            return marker is not None
        is_call = marker in _SECTION.openers or marker in _CALLS.opens
        read = _SECTION.read if marker in _SECTION.openers else _CALLS.read_call
        if not is_call:
            sink.marker()
        elif not (yield from read(context, marker)):
            sink.prose(marker)


FORMATS = (ToolFormat("muse", whole=_messages(calls=True)),)
ALIASES = {"atem": "muse", "muse_glimmer": "muse"}

REASONING = (ReasoningFormat("muse", (), (), whole=_messages(calls=False)),)
REASONING_ALIASES = {"muse_glimmer": "muse"}
