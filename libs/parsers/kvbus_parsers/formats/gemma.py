"""Gemma 4 and FunctionGemma: ``call:NAME{…}`` between tokens, the arguments in Gemma's own notation."""

import re

from kvbus_parsers.gemma_values import arguments
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.source import Step, markers

_NAME = re.compile(r"[\w.:-]*+")


def _gemma(name: str, opener: str, closer: str, delimiter: str, response: str) -> ToolFormat:
    """``response``: the token where a result is to come. The model stops there."""
    ends = markers(opener, closer)

    def read(context: Context, opener: str) -> Step[bool]:
        source, sink = context.source, context.sink
        recording = source.record()
        yield from source.skip_space()
        is_call = yield from source.literal("call:")
        tool = yield from source.take_while(_NAME)
        yield from source.skip_space()
        if not (is_call and tool and (yield from source.literal("{"))):
            return source.dismiss(recording)
        source.keep(recording)
        sink.start_call(tool)
        if (yield from arguments(source, sink.arguments, delimiter, ends)):
            sink.end_call()
            yield from source.skip_space()
            yield from source.literal(closer)
        return True

    return ToolFormat(name, (opener,), read, strays=(closer, response))


FORMATS = (
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
)

ALIASES = {"gemma_4": "gemma4"}
