"""Qwen3-Coder's tags, which many families took over.

    <tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎</function>⏎</tool_call>

One newline at either end of a value is framing; all else is verbatim. Newlines may be missing, and so may the wrapper and any
closer: a value ends at the next tag of the function as well. A wrapper may hold several functions.
"""

from dataclasses import dataclass

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import at_marker
from kvbus_parsers.source import Step, markers

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_HEADER_END = markers(">", "<", "\n")
_BODY = markers(_PARAMETER, _FUNCTION_END)
_VALUE_ENDS: markup.Ends = {_PARAMETER_END: None, _PARAMETER: None, _FUNCTION_END: None}


@dataclass(frozen=True, slots=True)
class _FunctionTags:
    """The wrapper ``opener … closer``. ``framed``: one newline at either end of a value is framing."""

    opener: str
    closer: str
    framed: bool = True

    def read(self, context: Context, marker: str) -> Step[bool]:
        if marker == self.opener:
            section = markup.Section(
                (marker,), (self.closer,), (_FUNCTION,), self._wrapped, (_PARAMETER_END, _FUNCTION_END)
            )
            return (yield from section.read(context, marker))
        if marker == _FUNCTION:
            return (yield from self._function(context, wrapped=False))
        return (yield from self._stray(context))

    def _wrapped(self, context: Context, _: str) -> Step[bool]:
        return (yield from self._function(context, wrapped=True))

    def _function(self, context: Context, *, wrapped: bool) -> Step[bool]:
        """Reads behind ``<function=``. Without a wrapper or a whole header it is a call only if the body of one follows."""
        source = context.source
        recording = source.record()
        header, stop = yield from source.take_until(_HEADER_END)
        if stop and stop != ">":
            source.unread(stop)
        name = header.strip()
        if not (wrapped and name and stop == ">"):
            yield from source.skip_space()
            if not name or not (yield from at_marker(context, _BODY)):
                is_markup = (yield from markup.cut_off(context, _BODY)) or (wrapped and stop is not None)
                if is_markup:
                    source.keep(recording)
                else:
                    source.rewind(recording)
                return is_markup
        source.keep(recording)
        yield from self._parameters(context, ArgumentWriter(context, name))
        return True

    def _parameters(self, context: Context, writer: ArgumentWriter) -> Step[None]:
        source = context.source
        tags = markers(_PARAMETER, _PARAMETER_END, _FUNCTION, _FUNCTION_END, self.opener, self.closer)
        while (tag := (yield from source.until(tags, writer.raw, in_call=True))) in (_PARAMETER, _PARAMETER_END):
            if tag == _PARAMETER_END:
                continue
            key, stop = yield from source.take_until(_HEADER_END)
            if stop == ">":
                stop = yield from markup.argument(context, writer, key.strip(), _VALUE_ENDS, framed=self.framed)
            elif not source.cut_off:
                writer.raw(_PARAMETER + key)
            if stop is not None:
                source.unread(stop)
        if tag is not None:
            writer.close()
            if tag != _FUNCTION_END:
                source.unread(tag)

    def _stray(self, context: Context) -> Step[bool]:
        """Reads behind a close tag of no call. These tags are common in XML: only those that lead up to ``closer`` are markup."""
        source = context.source
        recording = source.record()
        for closing in (markers(_FUNCTION_END, self.closer), markers(self.closer)):
            yield from source.skip_space()
            tag = yield from source.one_of(closing)
            if tag == self.closer:
                source.keep(recording)
                context.sink.marker()
                return True
        source.rewind(recording)
        return False


def _format(name: str, tags: _FunctionTags) -> ToolFormat:
    return ToolFormat(name, (tags.opener, _FUNCTION, _PARAMETER_END, _FUNCTION_END), tags.read, strays=(tags.closer,))


FORMATS = (
    _format("qwen3_coder", _FunctionTags("<tool_call>", "</tool_call>")),
    _format("mimo", _FunctionTags("<tool_call>", "</tool_call>", framed=False)),
    _format("seed_oss", _FunctionTags("<seed:tool_call>", "</seed:tool_call>")),
)

ALIASES = {
    "granite_thinking": "qwen3_coder",
    "nemotron3": "qwen3_coder",
    "nemotron_nano": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "qwen3coder": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
