"""Elements that carry their names in attributes: ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``.

MiniMax M2 and dots put them into a block of their own, Step 3 between special tokens. MiniCPM 5 says ``function`` and ``param``,
without a block, and may put a value into CDATA. Values are verbatim.
"""

from dataclasses import dataclass

from kvbus_parsers import markup
from kvbus_parsers.argument_writer import ArgumentWriter
from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import at_marker
from kvbus_parsers.source import Step, markers


@dataclass(frozen=True)
class InvokeTags:
    """The beginnings of the start tags, and the end tags. ``outer``: what may follow a call, or end one that has no end tag."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    parameter_opens: tuple[str, ...]
    parameter_closes: tuple[str, ...]
    outer: tuple[str, ...] = ()

    def read_call(self, context: Context, _: str) -> Step[bool]:
        """Reads a call behind the beginning of its start tag (`markup.CallReader`)."""
        source = context.source
        recording = source.record()
        tag = yield from markup.tag_rest(source)
        name = tag.attributes.get("name", "").strip() if tag else ""
        if not tag or not name:
            if source.cut_off:
                source.keep(recording)
                return True
            source.rewind(recording)
            return False
        source.keep(recording)
        writer = ArgumentWriter(context, self.tool_name(context, name))
        if tag.self_closing:
            writer.close()
        else:
            yield from self.read_body(context, writer)
        return True

    def tool_name(self, context: Context, written: str) -> str:
        return written

    def read_body(self, context: Context, writer: ArgumentWriter) -> Step[None]:
        source = context.source
        inside = markers(*self.opens, *self.closes, *self.parameter_opens, *self.parameter_closes, *self.outer)
        while True:
            stop = yield from source.until(inside, writer.raw, in_call=True)
            if stop in self.parameter_opens:
                yield from self._parameter(context, writer, stop)
            elif stop not in self.parameter_closes:
                break
        if stop is not None:
            self.close(writer)
            if stop not in self.closes:
                source.unread(stop)

    def close(self, writer: ArgumentWriter) -> None:
        writer.close()

    def read_value(self, context: Context, writer: ArgumentWriter, tag: markup.Tag) -> Step[str | None]:
        """Reads the value of a parameter up to the marker that ends it, and returns that."""
        return (yield from markup.argument(context, writer, tag.attributes["name"], self.ends))

    @property
    def ends(self) -> markup.Ends:
        """What ends a value: the end of the parameter, or of the call where one follows that can stand behind a call."""
        followers = markers(*self.opens, *self.outer)
        return dict.fromkeys(self.parameter_closes, None) | dict.fromkeys(self.closes, followers)

    def _parameter(self, context: Context, writer: ArgumentWriter, marker: str) -> Step[None]:
        source = context.source
        recording = source.record()
        tag = yield from markup.tag_rest(source)
        if not tag or not tag.attributes.get("name"):
            if source.cut_off:
                source.keep(recording)
            else:
                source.rewind(recording)
                writer.raw(marker)
            return
        source.keep(recording)
        if tag.self_closing:
            writer.begin(tag.attributes["name"])
            writer.end()
            return
        stop = yield from self.read_value(context, writer, tag)
        if stop is not None and stop not in self.parameter_closes:
            source.unread(stop)


def tags(invoke: str, parameter: str, *outer: str) -> InvokeTags:
    return InvokeTags((f"<{invoke}",), (f"</{invoke}>",), (f"<{parameter}",), (f"</{parameter}>",), outer)


def _block(name: str, block: str) -> ToolFormat:
    opener, closer = f"<{block}>", f"</{block}>"
    calls = tags("invoke", "parameter", closer)
    section = markup.Section((opener,), (closer,), calls.opens, calls.read_call, calls.closes)
    return ToolFormat(name, section.openers, section.read, strays=section.closers)


_STEP3 = tags(
    "steptml:invoke", "steptml:parameter", "<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>"
)
_STEP3_HEADER = ("function", "<｜tool_sep｜>", *_STEP3.opens)


def _read_step3_call(context: Context, opener: str) -> Step[bool]:
    source = context.source
    recording = source.record()
    for text in () if opener in _STEP3.opens else _STEP3_HEADER:
        yield from source.skip_space()
        if not (yield from source.literal(text)):
            cut = yield from markup.cut_off(context, markers(text))
            source.keep(recording) if cut else source.rewind(recording)
            return cut
    found = yield from _STEP3.read_call(context, opener)
    source.keep(recording) if found else source.rewind(recording)
    return found


def _step3() -> ToolFormat:
    call_opener, call_closer = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
    section = markup.Section(
        ("<｜tool_calls_begin｜>",),
        ("<｜tool_calls_end｜>",),
        (call_opener, *_STEP3.opens),
        _read_step3_call,
        (call_closer, *_STEP3.closes),
    )

    def read(context: Context, opener: str) -> Step[bool]:
        return (yield from (section.read if opener in section.openers else _read_step3_call)(context, opener))

    return ToolFormat("step3", (*section.openers, call_opener), read, strays=(*section.closers, call_closer))


class _MiniCpmTags(InvokeTags):
    def read(self, context: Context, opener: str) -> Step[bool]:
        """`ToolFormat.read`. Without a block around it, a start tag is a call only if the body of one follows."""
        source = context.source
        body = markers(*self.parameter_opens, *self.closes)
        recording = source.record()
        tag = yield from markup.tag_rest(source)
        yield from source.skip_space()
        is_call = tag is not None and (tag.self_closing or (yield from at_marker(context, body)))
        if not is_call and (yield from markup.cut_off(context, body)):
            source.keep(recording)
            return True
        source.rewind(recording)
        return is_call and (yield from self.read_call(context, opener))

    def read_value(self, context: Context, writer: ArgumentWriter, tag: markup.Tag) -> Step[str | None]:
        source = context.source
        space = yield from source.skip_space()
        if not (yield from source.literal("<![CDATA[")):
            source.unread(space)
            return (yield from super().read_value(context, writer, tag))
        ends: markup.Ends = {"]]>": markers(*self.parameter_closes)}
        stop = yield from markup.argument(context, writer, tag.attributes["name"], ends)
        if stop is None:
            return None
        yield from source.skip_space()
        return (yield from source.one_of(markers(*self.parameter_closes)))


def _minicpm5() -> ToolFormat:
    calls = _MiniCpmTags(("<function",), ("</function>",), ("<param",), ("</param>",))
    return ToolFormat("minicpm5", calls.opens, calls.read)


FORMATS = (_block("minimax_m2", "minimax:tool_call"), _block("dots", "dots_function_call"), _step3(), _minicpm5())

ALIASES = {"minimax_m25": "minimax_m2", "minimax": "minimax_m2", "minicpm5_xml": "minicpm5", "minicpm5xml": "minicpm5"}
