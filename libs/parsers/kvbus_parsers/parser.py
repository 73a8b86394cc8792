"""The parser of one output: feed it text, get events."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from kvbus_parsers import guided, names
from kvbus_parsers.events import Event
from kvbus_parsers.grammar import Context, Grammar, ReasoningFormat, Schema, ToolFormat
from kvbus_parsers.sink import Sink, mint_id
from kvbus_parsers.source import Source, Step, markers

FinishReason = Literal["stop", "length", "stop_sequence"]

_WORD = re.compile(r"[a-z]*+")


class Parser:
    """Parses the output of one choice. Any way to cut the text into pieces gives the same segments and calls."""

    def __init__(self, context: Context, grammar: Step[None]) -> None:
        self._source = context.source
        self._sink = context.sink
        self._resume = grammar.__next__
        self._ended = False
        self._advance()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text fed so far ends inside reasoning."""
        return self._sink.in_reasoning

    def feed(self, text: str) -> list[Event]:
        """The events that the next piece of output makes certain."""
        self._source.feed(text)
        self._advance()
        return self._sink.drain()

    def finish(self, reason: FinishReason) -> list[Event]:
        """The output is over: what was held back. Only ``stop`` says that the model ended it by itself."""
        self._source.finish(cut=reason != "stop")
        self._advance()
        self._sink.finish()
        return self._sink.drain()

    def _advance(self) -> None:
        if not self._ended:
            try:
                self._resume()
            except StopIteration:
                self._ended = True


def open_parser(
    *,
    tool: str | None = None,
    reasoning: str | None = None,
    tools: Iterable[Mapping[str, Any]] = (),
    reasoning_open: bool | None = None,
    calls: str = "auto",
    new_id: Callable[[], str] | None = None,
    nonempty_content: bool = False,
) -> Parser:
    """A parser for one output.

    ``tool``, ``reasoning``: names of formats or aliases of them; ``None`` is off. ``tools``: the offered tools, Chat Completions
    style; formats without types read the arguments by their schemas. ``reasoning_open``: whether the prompt ends inside reasoning,
    behind it, or says nothing (``None``). ``calls``: ``auto``; ``drop`` (markup of calls vanishes, prose stays); ``guided_array``
    or ``guided_arguments:NAME`` (the engine was made to write JSON; what does not begin with it is read by the format);
    ``guided_text:KEY:NAME`` (it was made to write one argument as plain text, which is all there is but for reasoning).
    ``new_id`` mints the ids of calls that have none, by default such as the format's templates take back.
    ``nonempty_content``: an output of nothing but reasoning is given as text, too, at its end. Raises
    `names.UnknownFormatError`.
    """
    tool_format = names.tool_format(tool) if tool else None
    reasoning_format = names.reasoning_format(reasoning) if reasoning else None
    sink = Sink(
        new_id or (tool_format and tool_format.new_id) or mint_id,
        drop_calls=calls == "drop",
        nonempty_content=nonempty_content,
    )
    context = Context(Source(), sink, _schemas(tools), _leading(calls, tool_format, reasoning_format))
    thinks = reasoning_format is not None and (
        reasoning_format.starts_open if reasoning_open is None else reasoning_open
    )
    return Parser(context, _output(context, tool_format, reasoning_format, thinks=thinks))


def _schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def _leading(calls: str, tool: ToolFormat | None, reasoning: ReasoningFormat | None) -> Grammar | None:
    thoughts = reasoning or (tool.reasoning if tool else None)
    openers = (*(tool.openers if tool else ()), *(thoughts.openers if thoughts else ()))
    guide = guided.grammar(calls, openers)
    native = tool.leading if tool else None
    if guide is None or native is None:
        return guide or native

    def either(context: Context) -> Step[bool]:
        return (yield from guide(context)) or (yield from native(context))

    return either


def _output(
    context: Context, tool: ToolFormat | None, reasoning: ReasoningFormat | None, *, thinks: bool
) -> Step[None]:
    if thinks:
        context.sink.open_reasoning()
    whole = (tool.whole if tool else None) or (reasoning.whole if reasoning else None)
    if whole is not None:
        yield from whole(context)
        yield from context.source.until(markers(), context.sink.prose)
    else:
        tool = tool or ToolFormat("none")
        yield from _prose_and_calls(context, tool, reasoning or tool.reasoning or ReasoningFormat("none", (), ()))


def _prose_and_calls(context: Context, tool: ToolFormat, reasoning: ReasoningFormat) -> Step[None]:
    """Text and reasoning, in turns, and calls in between."""
    source, sink = context.source, context.sink
    blocks = () if reasoning.phrases else reasoning.openers + reasoning.closers
    framing = reasoning.framing + tool.framing
    in_text = markers(*blocks, *framing, *tool.openers, *tool.strays)
    in_reasoning = markers(*blocks, *reasoning.closers, *(tool.openers if reasoning.ends_on_tool_opener else ()))
    if reasoning.prefix:
        sink.prose(reasoning.prefix)
    if reasoning.phrases:
        yield from _opening_phrase(context, reasoning)
    at_start = True  # of content: of the output, or behind reasoning
    while True:
        if at_start and context.leading and not sink.in_reasoning:
            at_start = False
            if (yield from context.leading(context)):
                continue
        marker = yield from source.until(in_reasoning if sink.in_reasoning else in_text, sink.prose)
        if marker is None:
            return
        if marker in reasoning.openers:
            sink.open_reasoning()
            if reasoning.label:
                yield from _label(context, reasoning)
        elif marker in reasoning.closers and sink.in_reasoning:
            at_start = True
            sink.close_reasoning()
        elif tool.read and marker in tool.openers:
            if (yield from tool.read(context, marker)):
                sink.marker()
            else:
                sink.prose(marker)
        elif marker in framing:
            sink.marker()


def _opening_phrase(context: Context, reasoning: ReasoningFormat) -> Step[None]:
    space = yield from context.source.skip_space()
    if (yield from context.source.one_of(markers(*reasoning.openers))):
        context.sink.open_reasoning()
    else:
        context.source.unread(space)


def _label(context: Context, reasoning: ReasoningFormat) -> Step[None]:
    word = yield from context.source.take_while(_WORD)
    if word != reasoning.label or (yield from context.source.peek()) not in "\n<":
        context.source.unread(word)
