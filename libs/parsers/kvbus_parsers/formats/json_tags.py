"""Formats that write calls as JSON behind a marker: Hermes and its many relatives."""

import re

from kvbus_parsers.grammar import Context, ReasoningFormat, ToolFormat
from kvbus_parsers.json_calls import (
    CallEnd,
    CallKeys,
    at_marker,
    broken_rest,
    call_array,
    call_object,
    call_or_array,
)
from kvbus_parsers.markup import cut_off
from kvbus_parsers.source import Markers, Step, markers

_KEYS = CallKeys()
_STRICT = CallKeys(strict=True)
_LEFT_OVER = re.compile(r"[\s,}\]]*+")


def json_tags(
    name: str,
    openers: tuple[str, ...],
    closers: tuple[str, ...] = (),
    *,
    strays: tuple[str, ...] = (),
    framing: tuple[str, ...] = (),
    keys: CallKeys = _KEYS,
    reasoning: ReasoningFormat | None = None,
    plain_word: bool = False,
    bare: bool = False,
) -> ToolFormat:
    """``OPENER {call} CLOSER`` or ``OPENER [{call}, …] CLOSER``; the JSON ends by its own grammar, the closer may be missing.

    ``plain_word``: the opener is no special token, so it is text wherever no call follows. ``bare``: an array of calls that begins
    the content needs no opener.
    """
    opening, closing = markers(*openers), markers(*closers)
    stops = markers(*openers, *closers)

    def read(context: Context, opener: str) -> Step[bool]:
        source, sink = context.source, context.sink
        recording = source.record()
        yield from source.skip_space()
        if (yield from source.one_of(opening)):  # twice, but not any number of times: giving back must stay cheap
            yield from source.skip_space()
        if not (yield from source.ahead("[" if plain_word else "{[")):
            if not plain_word:
                return source.dismiss(recording)
            source.rewind(recording)
            return False
        if plain_word:
            ended = yield from call_array(context, _STRICT, stops)
            if ended is CallEnd.REJECTED:
                return source.dismiss(recording)
            source.keep(recording)
        else:
            source.keep(recording)
            yield from _bodies(context, keys, opening, closing)
        space = yield from source.skip_space()
        if not (yield from source.one_of(closing)):
            source.unread(space)
        sink.marker()
        return True

    leading = _bare_array if bare else None
    return ToolFormat(name, openers, read, closers + strays, leading=leading, reasoning=reasoning, framing=framing)


def _bodies(context: Context, keys: CallKeys, opening: Markers, closing: Markers) -> Step[None]:
    """The JSON of one block: an object or an array, or several of them."""
    source = context.source
    stops = markers(*opening.texts, *closing.texts)
    called = False
    while (yield from source.ahead("{[")) and not (called and (yield from _at_empty_array(context))):
        ended: CallEnd | None = yield from call_or_array(context, keys, stops)
        if ended is CallEnd.REJECTED:
            yield from broken_rest(context, stops)
        while ended is CallEnd.CALLED:
            called = True
            context.sink.marker()
            if (ended := (yield from _call_behind_left_over(context, keys, opening, closing))) is None:
                break
        else:
            break


def _call_behind_left_over(
    context: Context, keys: CallKeys, opening: Markers, closing: Markers
) -> Step[CallEnd | None]:
    """One brace too many behind a call, or the brackets of an array that are missing on the other side, are forgiven where another
    call or the end of the block follows. None: no call follows here; what is no left-over then is text."""
    source = context.source
    recording = source.record()
    left_over = yield from source.take_while(_LEFT_OVER)
    if left_over.strip() and (yield from source.peek()) == "{":
        ended = yield from call_object(context, keys, markers(*opening.texts, *closing.texts))
        if ended is not CallEnd.REJECTED:
            source.keep(recording)
            return ended
    elif left_over and (yield from _at_end_of_block(context, opening, closing)):
        source.keep(recording)
        return None
    source.rewind(recording)
    return None


def _at_end_of_block(context: Context, opening: Markers, closing: Markers) -> Step[bool]:
    """Whether a closer stands here, or an opener with a body behind it. An opener without one is text, as what is before it."""
    source = context.source
    if (yield from at_marker(context, closing)):
        return True
    recording = source.record()
    found = False
    if (yield from source.one_of(opening)):
        yield from source.skip_space()
        if (yield from source.one_of(opening)):  # twice, as where a block begins
            yield from source.skip_space()
        found = yield from source.ahead("{[")
    source.rewind(recording)
    return found


def _at_empty_array(context: Context) -> Step[bool]:
    """Whether ``[]`` stands here. It is a body without calls only where no call stands before it, and else text."""
    source = context.source
    recording = source.record()
    yield from source.literal("[")
    yield from source.skip_space()
    found = yield from source.literal("]")
    source.rewind(recording)
    return found


def _bare_array(context: Context) -> Step[bool]:
    recording = context.source.record()
    yield from context.source.skip_space()
    if (yield from call_array(context, _STRICT)) is CallEnd.REJECTED:
        context.source.rewind(recording)
        return False
    context.source.keep(recording)
    return True


_KINDS = markers("<|plugin|>", "<|interpreter|>")
_ACTION = json_tags("internlm2", ("<|plugin|>",), ("<|action_end|>",))


def _action(context: Context, opener: str) -> Step[bool]:
    """``<|action_start|>`` and what kind of action: a call, or code, which is shown."""
    source = context.source
    recording = source.record()
    yield from source.skip_space()
    if (yield from source.literal(opener)):  # twice
        yield from source.skip_space()
    kind = yield from source.one_of(_KINDS)
    if kind is None:
        yield from cut_off(context, _KINDS)
        return source.dismiss(recording)
    source.keep(recording)
    if kind == "<|plugin|>" and _ACTION.read:
        return (yield from _ACTION.read(context, kind))
    context.sink.marker()
    yield from broken_rest(context, markers("<|action_end|>"))
    yield from source.one_of(markers("<|action_end|>"))
    context.sink.marker()
    return True


FORMATS = (
    json_tags("hermes", ("<tool_call>",), ("</tool_call>",)),
    json_tags("longcat", ("<longcat_tool_call>",), ("</longcat_tool_call>",)),
    json_tags("ernie45", ("<tool_call>",), ("</tool_call>",), framing=("<response>", "</response>")),
    json_tags("nemotron_deci", ("<TOOLCALL>",), ("</TOOLCALL>",), bare=True),
    json_tags("default", ("<TOOLCALL>", "<|python_tag|>"), ("</TOOLCALL>",), bare=True),
    json_tags("jamba", ("<tool_calls>",), ("</tool_calls>",)),
    json_tags("granite", ("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    json_tags("granite_20b_fc", ("<function_call>",), ("</function_call>",)),
    json_tags("gigachat3", ("function call<|role_sep|>", "<|function_call|>"), ("</s>",), framing=("<|message_sep|>",)),
    json_tags("phi4", ("functools",), plain_word=True),
    ToolFormat("internlm2", ("<|action_start|>",), _action, strays=("<|action_end|>",)),
)

ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "trinity": "hermes",
    "nemotron_json": "nemotron_deci",
    "hunyuan_a13b": "jamba",
    "phi4_mini_json": "phi4",
    "internlm": "internlm2",
    "interns1": "internlm2",
}
