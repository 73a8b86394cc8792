"""Turns what grammars find into events: white space, ids, indexes, merged deltas, dropped calls."""

import secrets
from collections.abc import Callable, Mapping

from kvbus_parsers.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text


def mint_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Sink:
    """White space that touches a marker is framing: a text segment loses it where it begins after or ends before a marker, a
    reasoning segment at both ends. So white space is held until it is known what follows it.
    """

    __slots__ = (
        "_arguments", "_call", "_drop_calls", "_events", "_framing", "_ids", "_index", "_new_id", "_pieces", "_run",
        "_said", "_space", "_thoughts", "in_reasoning",
    )  # fmt: skip

    def __init__(
        self, new_id: Callable[[], str] = mint_id, *, drop_calls: bool = False, nonempty_content: bool = False
    ) -> None:
        self.in_reasoning = False
        self._new_id = new_id
        self._drop_calls = drop_calls
        self._events: list[Event] = []
        self._run: type[Text | Reasoning] | None = (
            None  # the kind of the delta that grows in _pieces; None: call arguments
        )
        self._pieces: list[str] = []
        self._framing = False  # white space here follows a marker
        self._space: list[str] = []  # held white space
        self._said = False  # the open reasoning segment has text
        self._call: CallStarted | None = None
        self._arguments: list[str] = []
        self._index = 0
        self._ids: set[str] = set()
        self._thoughts: list[str] | None = (
            [] if nonempty_content else None
        )  # kept as long as there is nothing but reasoning

    # --- prose

    def prose(self, text: str) -> None:
        """Text in whichever segment is open: reasoning or plain text."""
        if self._framing:
            text = text.lstrip()
        if not text:
            return
        self._framing = False
        if self._space or text[-1].isspace():
            kept = text.rstrip()
            if not kept:
                self._space.append(text)
                return
            self._space, space = [text[len(kept) :]] if len(kept) < len(text) else [], self._space
            text = "".join(space) + kept
        kind = Reasoning if self.in_reasoning else Text
        if self._run is not kind:
            self._flush()
            self._run = kind
        self._said = self.in_reasoning
        if self._thoughts is not None:
            self._keep_thought(text)
        self._pieces.append(text)

    def _keep_thought(self, text: str) -> None:
        if self.in_reasoning and self._thoughts is not None:
            self._thoughts.append(text)
        else:
            self._thoughts = None

    def marker(self) -> None:
        """Markup was read that belongs to no call: white space around it is framing."""
        if not self._drop_calls or self.in_reasoning:
            self._space.clear()
        self._framing = True

    def break_line(self) -> None:
        """Markup was read behind which the open segment goes on in a new line."""
        self._space = ["\n"]

    def open_reasoning(self) -> None:
        if not self.in_reasoning:
            self._space.clear()
            self._framing = True
            self.in_reasoning = True

    def close_reasoning(self) -> None:
        if self.in_reasoning:
            self._space.clear()
            if self._said:
                self._flush()
                self._events.append(ReasoningEnded())
            self._said = self.in_reasoning = False
        self._framing = True

    # --- calls

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call begins, and ends open reasoning. ``call_id``: the model's own, replaced if it is used already."""
        self.close_reasoning()
        self.marker()
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        while call_id in self._ids:
            call_id += str(len(self._ids))
        self._ids.add(call_id)
        self._call = CallStarted(self._index, call_id, name)
        self._arguments = []
        if not self._drop_calls:
            self._flush()
            self._events.append(self._call)
            self._index += 1

    def arguments(self, text: str) -> None:
        """The next piece of the open call's arguments."""
        if text and self._call:
            self._arguments.append(text)
            if not self._drop_calls:
                self._pieces.append(text)

    def end_call(self, written: Mapping[str, str] | None = None) -> None:
        """The open call is complete. A call without arguments has ``{}``."""
        if not self._call:
            return
        if not self._arguments:
            self.arguments("{}")
        if not self._drop_calls:
            self._flush()
            call = self._call
            self._events.append(CallEnded(call.index, call.id, call.name, "".join(self._arguments), written))
        self._call = None
        self._framing = True

    # --- the side of the parser

    def finish(self) -> None:
        """The output ends: white space that touches no marker is text."""
        if self._thoughts and not self._index:
            self.close_reasoning()
            self.prose("".join(self._thoughts))
        if self._space and not self.in_reasoning and not self._framing:
            space = "".join(self._space)
            self._space = []
            if self._run is not Text:
                self._flush()
                self._run = Text
            self._pieces.append(space)

    def drain(self) -> list[Event]:
        if self._pieces:
            self._flush()
        events = self._events
        self._events = []
        return events

    def _flush(self) -> None:
        if self._pieces:
            text = "".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
            self._pieces = []
            if self._run is not None:
                self._events.append(self._run(text))
            elif self._call:
                self._events.append(CallArguments(self._call.index, text))
        self._run = None
