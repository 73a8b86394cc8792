"""Events to a whole result, for answers that are not streamed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvbus_parsers.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_parsers.parser import FinishReason


@dataclass(slots=True)
class TextSegment:
    text: str


@dataclass(slots=True)
class ReasoningSegment:
    text: str


@dataclass(slots=True)
class CallSegment:
    """``complete`` is False for a call that the end of the output cut off; its arguments are what came of them."""

    index: int
    id: str
    name: str
    arguments: str = ""
    complete: bool = False
    written: Mapping[str, str] | None = None


Segment = TextSegment | ReasoningSegment | CallSegment


@dataclass(slots=True)
class Collected:
    """``segments`` in the order in which the model wrote them; ``finish_reason`` as Chat Completions reports it."""

    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = "stop"

    @property
    def content(self) -> str | None:
        return "".join(segment.text for segment in self.segments if isinstance(segment, TextSegment)) or None

    @property
    def reasoning(self) -> str | None:
        return "".join(segment.text for segment in self.segments if isinstance(segment, ReasoningSegment)) or None

    @property
    def tool_calls(self) -> list[CallSegment]:
        return [segment for segment in self.segments if isinstance(segment, CallSegment)]


def collect(events: Iterable[Event], finish: FinishReason = "stop") -> Collected:
    """All events of one output, `Parser.finish` included, as one result."""
    collected = Collected()
    segments = collected.segments
    pieces: list[str] = []  # of the last segment
    ended = False  # no more reasoning joins the last segment

    def close() -> None:
        if pieces and segments:
            last = segments[-1]
            if isinstance(last, CallSegment):
                last.arguments = "".join(pieces)
            else:
                last.text = "".join(pieces)
        pieces.clear()

    def text(kind: type[TextSegment] | type[ReasoningSegment], delta: str) -> None:
        if ended or not segments or not isinstance(segments[-1], kind):
            close()
            segments.append(kind(""))
        pieces.append(delta)

    for event in events:
        match event:
            case Text(delta):
                text(TextSegment, delta)
            case Reasoning(delta):
                text(ReasoningSegment, delta)
            case CallStarted():
                close()
                segments.append(CallSegment(event.index, event.id, event.name))
            case CallArguments():
                pieces.append(event.text)
            case CallEnded():
                close()
                last = segments[-1]
                if isinstance(last, CallSegment):
                    last.arguments, last.complete, last.written = event.arguments, True, event.written
        ended = isinstance(event, ReasoningEnded)
    close()
    if finish == "length":
        collected.finish_reason = "length"
    elif finish == "stop" and any(call.complete for call in collected.tool_calls):
        collected.finish_reason = "tool_calls"
    return collected
