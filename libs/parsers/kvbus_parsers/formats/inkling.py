"""Inkling: typed messages.

    <|message_model|>[HEADER]<|content_thinking|>…<|end_message|>
    <|message_model|>[HEADER]<|content_text|>…<|end_message|>
    <|message_model|>[HEADER]<|content_invoke_tool_json|>{"name": …, "args": …}<|end_message|>
    <|message_model|>NAME<|content_invoke_tool_text|>…<|end_message|>

Output without a frame is text.
"""

from kvbus_parsers.grammar import Context, Grammar, ReasoningFormat, ToolFormat
from kvbus_parsers.json_calls import CallEnd, CallKeys, broken_rest, call_object
from kvbus_parsers.source import Step, markers

_AUTHORS = tuple(f"<|message_{author}|>" for author in ("model", "user", "system", "tool"))
_TEXT, _THINKING = "<|content_text|>", "<|content_thinking|>"
_JSON_CALL, _TEXT_CALL = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"
_OTHERS = tuple(f"<|content_{kind}|>" for kind in ("xml", "invoke_tool", "tool_error", "image", "audio_input"))
_KINDS = (_TEXT, _THINKING, _JSON_CALL, _TEXT_CALL, *_OTHERS)
_TOKENS = markers(*_AUTHORS, *_KINDS, "<|end_message|>", "<|content_model_end_sampling|>", "<|endoftext|>")
_KEYS = CallKeys(arguments=("args", "arguments", "parameters"))
_HEADER_LENGTH_MAX = 256


def _output(*, calls: bool) -> Grammar:
    """``calls``: whether calls are read, or shown."""

    def read(context: Context) -> Step[bool]:
        if context.leading and not context.sink.in_reasoning:
            yield from context.leading(context)
        token = yield from context.source.until(_TOKENS, context.sink.prose)
        while token is not None:
            token = yield from _message(context, token, calls=calls)
        return True

    return read


def _message(context: Context, token: str, *, calls: bool) -> Step[str | None]:
    """Reads on behind a token, to the next one, which is returned."""
    source, sink = context.source, context.sink
    sink.close_reasoning()
    sink.marker()
    header, kind = "", token
    if token in _AUTHORS:
        header, after = yield from source.take_until(_TOKENS, _HEADER_LENGTH_MAX)
        if after not in _KINDS:
            # Not a header: the message has no type. It is dropped only where it could have become one.
            sink.prose("" if source.cut_off else header)
            return after or (yield from source.until(_TOKENS, sink.prose))
        kind = after
    if kind == _THINKING:
        sink.open_reasoning()
    elif kind == _JSON_CALL and calls:
        yield from source.skip_space()
        if (yield from call_object(context, _KEYS, _TOKENS)) is CallEnd.REJECTED:
            yield from broken_rest(context, _TOKENS)
    elif kind == _TEXT_CALL and calls and header.strip():
        sink.start_call(header.strip())
        stop = yield from source.until(_TOKENS, sink.arguments, in_call=True)
        if stop or not source.cut_off:
            sink.end_call()
        return stop
    elif kind == _TEXT and context.leading:
        yield from context.leading(context)
    return (yield from source.until(_TOKENS, sink.prose))


FORMATS = (ToolFormat("inkling", whole=_output(calls=True)),)
REASONING = (ReasoningFormat("inkling", whole=_output(calls=False)),)
