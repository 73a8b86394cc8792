"""Harmony (gpt-oss): messages with a header that says whose they are.

    <|start|>ROLE[ to=RECIPIENT]<|channel|>CHANNEL[ to=RECIPIENT][ <|constrain|>TYPE]<|message|>BODY<|end|>

The recipient decides: a message to anyone but a role is a call, on any channel. Else ``analysis`` is reasoning and every other
channel is text. The prompt ends with ``<|start|>assistant``, so the output begins inside a header. Messages of one kind that follow
each other are joined by a newline.
"""

import re
from enum import Enum, auto

from kvbus_parsers.grammar import Context, Grammar, ReasoningFormat, ToolFormat
from kvbus_parsers.json_scan import JsonEnd
from kvbus_parsers.markup import cut_off
from kvbus_parsers.source import Step, markers

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_IN_HEADER = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TOKENS = markers(*_IN_HEADER, *_ENDS)
_MESSAGE_ENDS = markers(_START, *_ENDS)
_HEADER_STOPS = markers(_START, _MESSAGE, *_ENDS)
_HEADER_LENGTH_MAX = 1024

_CHANNELS = ("analysis", "commentary", "final")
_ROLE_BEGINNINGS = tuple(f"assistant{after}" for after in (_CHANNEL, _MESSAGE, " to="))
_HEADER_BEGINNINGS = markers("to=", _CHANNEL, _CONSTRAIN, _MESSAGE, *_ROLE_BEGINNINGS)
_TOKENS_OR_ROLE = markers(*_TOKENS.texts, *_ROLE_BEGINNINGS)
_CHANNEL_BEGINNINGS = markers(*(name + after for name in _CHANNELS for after in (_MESSAGE, f" {_CONSTRAIN}", " to=")))
_RECIPIENT = re.compile(r"\bto=(?P<namespace>functions\.)?(?P<name>[^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_WORDS = re.compile(rf"<\|\w+\|>|\bto=\S+|\b(?:assistant|json|code|{'|'.join(_CHANNELS)})\b")
_ROLES = {"assistant", "user", "system", "developer", "tool", "all"}


class _Kind(Enum):
    NONE = auto()
    CALL = auto()
    REASONING = auto()
    TEXT = auto()


class _Output:
    def __init__(self, context: Context, *, calls: bool) -> None:
        self._context = context
        self._source = context.source
        self._sink = context.sink
        self._calls = calls
        self._last = _Kind.REASONING if self._sink.in_reasoning else _Kind.NONE
        """What the message before this one was."""
        self._said = False
        """It had text."""

    def read(self) -> Step[bool]:
        token = yield from self._beginning()
        while token is not None:
            token = yield from (self._message(token) if token in _IN_HEADER else self._between())
        return True

    def _beginning(self) -> Step[str | None]:
        """The output begins inside a header, unless it is no Harmony at all, like the JSON that an engine was made to write."""
        space = yield from self._source.skip_space()
        found = yield from self._source.one_of(_MESSAGE_ENDS)
        if found:
            return found
        for beginnings, token in ((_HEADER_BEGINNINGS, _START), (_CHANNEL_BEGINNINGS, _CHANNEL)):
            found = yield from self._source.one_of(beginnings)
            if found:
                self._source.unread(found)
                return token
        self._source.unread(space)
        if not self._sink.in_reasoning:
            self._last = _Kind.TEXT
            if self._context.leading:
                yield from self._context.leading(self._context)
        return (yield from self._text())

    def _between(self) -> Step[str | None]:
        """Behind a message the next one begins. Text that stands here is shown."""
        yield from self._source.skip_space()
        token = yield from self._source.one_of(_TOKENS_OR_ROLE)
        if token in _ROLE_BEGINNINGS:
            self._source.unread(token)
            return _START
        if token is None and ((yield from cut_off(self._context, _TOKENS)) or self._source.exhausted):
            self._sink.close_reasoning()
            self._sink.marker()
        elif token is None:
            self._begin(_Kind.TEXT)
            token = yield from self._text()
        return token

    def _begin(self, kind: _Kind) -> None:
        if kind is self._last and self._said:
            self._sink.break_line()
            return
        self._sink.close_reasoning()
        self._sink.marker()
        if kind is _Kind.REASONING:
            self._sink.open_reasoning()
        self._last, self._said = kind, False

    def _say(self, text: str) -> None:
        self._said = self._said or not text.isspace()
        self._sink.prose(text)

    def _message(self, token: str) -> Step[str | None]:
        """Reads a message from behind the first token of its header; returns the token that ended it."""
        if token == _MESSAGE:
            return (yield from self._body(""))
        text, stop = yield from self._source.take_until(_HEADER_STOPS, _HEADER_LENGTH_MAX)
        if stop == _MESSAGE:
            return (yield from self._body(token + text))
        if not self._source.cut_off:
            # A header without a message. What is no word of a header was meant to be read.
            self._begin(_Kind.TEXT)
            self._say(_HEADER_WORDS.sub("", token + text))
        return stop if stop or self._source.exhausted else (yield from self._text())

    def _body(self, header: str) -> Step[str | None]:
        channels = _CHANNEL_NAME.findall(header)
        recipient = _RECIPIENT.search(header)
        if self._calls and recipient and (recipient["namespace"] or recipient["name"] not in _ROLES):
            return (yield from self._call(recipient["name"]))
        kind = _Kind.REASONING if channels and channels[-1] == "analysis" else _Kind.TEXT
        yield from self._source.skip_space()
        self._begin(kind)
        if kind is _Kind.TEXT and self._context.leading:
            yield from self._context.leading(self._context)
        return (yield from self._text())

    def _text(self) -> Step[str | None]:
        while True:
            stop = yield from self._source.until(_TOKENS, self._say)
            if stop not in (_MESSAGE, _CONSTRAIN):
                return stop

    def _call(self, name: str) -> Step[str | None]:
        """The body is the arguments: JSON, in whose strings tokens are data, or whatever the tool is to read."""
        source, sink = self._source, self._sink
        sink.start_call(name)
        self._last, self._said = _Kind.CALL, False
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            ended = yield from source.json_value(sink.arguments)
            if ended is JsonEnd.CUT:
                return None
            if ended is JsonEnd.COMPLETE:
                yield from source.skip_space()
        stop = yield from source.until(_TOKENS, sink.arguments, in_call=True)
        if stop or not source.cut_off:
            sink.end_call()
        return stop


def _whole(*, calls: bool) -> Grammar:
    def read(context: Context) -> Step[bool]:
        return (yield from _Output(context, calls=calls).read())

    return read


FORMATS = (ToolFormat("harmony", whole=_whole(calls=True)),)
ALIASES = {"gpt_oss": "harmony", "openai": "harmony"}
REASONING = (ReasoningFormat("gpt_oss", whole=_whole(calls=False)),)
REASONING_ALIASES = {"openai_gptoss": "gpt_oss", "harmony": "gpt_oss"}
