"""Output items of the Responses API while they are being written: each knows the events of its life.

    added -> (part added -> deltas -> text done -> part done) -> done

One item is open at a time. A call that the end of the output cuts off gets no ``done``, neither for its arguments nor for itself:
clients run a call when they see it done, and half a patch or half a script must never run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from kvbus_frontend.core.free_text import FreeText
from kvbus_protocols import sse
from kvbus_protocols.responses import events
from kvbus_protocols.responses.response import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    Logprob,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    ToolSearchCall,
)
from kvbus_protocols.responses.tools import Callee

Seal = Callable[[str], str]


class EventWriter:
    """Numbers the events of one response."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, event: type[events.Event], **fields: Any) -> bytes:
        made = event(sequence_number=self._next, **fields)
        self._next += 1
        return sse.event(made, name=made.type)  # type: ignore[attr-defined]  # every event has one


class Place(msgspec.Struct, frozen=True):
    """Where an item stands. ``id_root``: what the ids of a response's items have in common."""

    writer: EventWriter
    index: int
    id_root: str

    def id(self, prefix: str) -> str:
        return f"{prefix}_{self.id_root}{self.index:04x}"

    def added(self, item: OutputItem) -> bytes:
        return self.writer.write(
            events.ItemEvent, type="response.output_item.added", output_index=self.index, item=item
        )

    def done(self, item: OutputItem) -> bytes:
        return self.writer.write(events.ItemEvent, type="response.output_item.done", output_index=self.index, item=item)


class OpenItem(Protocol):
    def opening(self) -> Iterator[bytes]: ...

    def item(self, status: ItemStatus) -> OutputItem:
        """As it is now."""

    def closing(self, item: Any) -> Iterator[bytes]:
        """``item``: the last one that `item` has returned."""


class OpenMessage:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._id = place.id("msg")
        self._pieces: list[str] = []
        self._logprobs: list[Logprob] = []

    def opening(self) -> Iterator[bytes]:
        yield self._place.added(OutputMessage(id=self._id, status="in_progress", content=()))
        yield self._event(events.ContentPartEvent, type="response.content_part.added", part=OutputText(text=""))

    def add(self, text: str, logprobs: Sequence[Logprob]) -> Iterator[bytes]:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        yield self._event(events.TextDelta, delta=text, logprobs=tuple(logprobs))

    def item(self, status: ItemStatus) -> OutputMessage:
        part = OutputText(text="".join(self._pieces), logprobs=tuple(self._logprobs))
        return OutputMessage(id=self._id, status=status, content=(part,))

    def closing(self, item: OutputMessage) -> Iterator[bytes]:
        (part,) = item.content
        yield self._event(events.TextDone, text=part.text, logprobs=part.logprobs)
        yield self._event(events.ContentPartEvent, type="response.content_part.done", part=part)
        yield self._place.done(item)

    def _event(self, event: type[events.Event], **fields: Any) -> bytes:
        return self._place.writer.write(event, item_id=self._id, output_index=self._place.index, **fields)


class OpenReasoning:
    """``summary``: the thought is shown as its own summary too, for clients that show nothing else."""

    def __init__(self, place: Place, *, summary: bool, seal: Seal | None) -> None:
        self._place = place
        self._id = place.id("rs")
        self._summary = summary
        self._seal = seal
        self._pieces: list[str] = []

    def opening(self) -> Iterator[bytes]:
        yield self._place.added(ReasoningItem(id=self._id, status="in_progress"))
        yield self._event(events.ContentPartEvent, type="response.content_part.added", part=ReasoningText(text=""))
        if self._summary:
            part = SummaryText(text="")
            yield self._event(events.SummaryPartEvent, type="response.reasoning_summary_part.added", part=part)

    def add(self, text: str) -> Iterator[bytes]:
        self._pieces.append(text)
        yield self._event(events.ReasoningDelta, delta=text)
        if self._summary:
            yield self._event(events.SummaryDelta, delta=text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._pieces)
        return ReasoningItem(
            id=self._id,
            status=status,
            summary=(SummaryText(text=text),) if self._summary else (),
            content=(ReasoningText(text=text),),
            encrypted_content=self._seal(text) if self._seal is not None else UNSET,
        )

    def closing(self, item: ReasoningItem) -> Iterator[bytes]:
        for content in item.content:
            yield self._event(events.ReasoningDone, text=content.text)
            yield self._event(events.ContentPartEvent, type="response.content_part.done", part=content)
        for part in item.summary:
            yield self._event(events.SummaryDone, text=part.text)
            yield self._event(events.SummaryPartEvent, type="response.reasoning_summary_part.done", part=part)
        yield self._place.done(item)

    def _event(self, event: type[events.Event], **fields: Any) -> bytes:
        return self._place.writer.write(event, item_id=self._id, output_index=self._place.index, **fields)


class OpenCall(Protocol):
    """A call of any kind. ``finish``: the whole arguments have come, closing follows."""

    def opening(self) -> Iterator[bytes]: ...

    def add(self, arguments: str) -> Iterator[bytes]: ...

    def finish(self, arguments: str) -> Iterator[bytes]: ...

    def item(self, status: ItemStatus) -> OutputItem: ...

    def closing(self, item: Any) -> Iterator[bytes]: ...


def open_call(place: Place, call_id: str, callee: Callee) -> OpenCall:
    match callee.kind:
        case "custom":
            return _CustomCall(place, call_id, callee)
        case "search":
            return _SearchCall(place, call_id)
        case _:
            return _FunctionCall(place, call_id, callee)


class _FunctionCall:
    def __init__(self, place: Place, call_id: str, callee: Callee) -> None:
        self._place = place
        self._callee = callee
        self._blank = FunctionCall(
            id=place.id("fc"),
            status="in_progress",
            call_id=call_id,
            name=callee.name,
            namespace=callee.namespace if callee.namespace is not None else UNSET,
            arguments="",
        )
        self._pieces: list[str] = []

    def opening(self) -> Iterator[bytes]:
        yield self._place.added(self._blank)

    def add(self, arguments: str) -> Iterator[bytes]:
        self._pieces.append(arguments)
        yield self._event(events.ArgumentsDelta, delta=arguments)

    def finish(self, arguments: str) -> Iterator[bytes]:
        rest = arguments.removeprefix("".join(self._pieces))  # "{}" stands for arguments that were never written
        if rest:
            yield from self.add(rest)

    def item(self, status: ItemStatus) -> FunctionCall:
        return msgspec.structs.replace(self._blank, status=status, arguments="".join(self._pieces))

    def closing(self, item: FunctionCall) -> Iterator[bytes]:
        if item.status == "completed":
            yield self._event(events.ArgumentsDone, name=item.name, arguments=item.arguments)
            yield self._place.done(item)

    def _event(self, event: type[events.Event], **fields: Any) -> bytes:
        return self._place.writer.write(event, item_id=self._blank.id, output_index=self._place.index, **fields)


class _CustomCall:
    """The model writes JSON around the text; the client sees the text."""

    def __init__(self, place: Place, call_id: str, callee: Callee) -> None:
        self._place = place
        self._blank = CustomToolCall(
            id=place.id("ctc"),
            status="in_progress",
            call_id=call_id,
            name=callee.name,
            namespace=callee.namespace if callee.namespace is not None else UNSET,
            input="",
        )
        self._text = FreeText()

    def opening(self) -> Iterator[bytes]:
        yield self._place.added(self._blank)

    def add(self, arguments: str) -> Iterator[bytes]:
        yield from self._delta(self._text.feed(arguments))

    def finish(self, arguments: str) -> Iterator[bytes]:
        yield from self._delta(self._text.finish(arguments))

    def item(self, status: ItemStatus) -> CustomToolCall:
        return msgspec.structs.replace(self._blank, status=status, input=self._text.text)

    def closing(self, item: CustomToolCall) -> Iterator[bytes]:
        if item.status == "completed":
            yield self._event(events.CustomInputDone, input=item.input)
            yield self._place.done(item)

    def _delta(self, text: str) -> Iterator[bytes]:
        if text:
            yield self._event(events.CustomInputDelta, delta=text)

    def _event(self, event: type[events.Event], **fields: Any) -> bytes:
        return self._place.writer.write(event, item_id=self._blank.id, output_index=self._place.index, **fields)


class _SearchCall:
    """Its arguments are an object and come in one piece: this API has no events for parts of them."""

    def __init__(self, place: Place, call_id: str) -> None:
        self._place = place
        self._blank = ToolSearchCall(id=place.id("tsc"), status="in_progress", call_id=call_id, arguments={})

    def opening(self) -> Iterator[bytes]:
        yield self._place.added(self._blank)

    def add(self, arguments: str) -> Iterator[bytes]:
        yield from ()

    def finish(self, arguments: str) -> Iterator[bytes]:
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = {"query": arguments}
        self._blank = msgspec.structs.replace(self._blank, arguments=value)
        yield from ()

    def item(self, status: ItemStatus) -> ToolSearchCall:
        return msgspec.structs.replace(self._blank, status=status)

    def closing(self, item: ToolSearchCall) -> Iterator[bytes]:
        if item.status == "completed":
            yield self._place.done(item)
