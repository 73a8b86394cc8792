"""What the choices of a request have produced and the client has not been sent yet: bounded, and merged when it waits."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvbus_frontend.core.choice_text import TokenText
from kvbus_parsers import CallArguments, Event, Reasoning, Text
from kvbus_protocols.errors import ApiError
from kvbus_protocols.generation import Usage


class Finish(msgspec.Struct, frozen=True):
    """``reason``: stop or length; ``stop``: the stop string or stop token id that ended the choice."""

    reason: str
    stop: str | int | None = None


class ChoiceOutput(msgspec.Struct, frozen=True):
    """The next events of one choice, the log probabilities of the tokens they came from, and its end if that follows."""

    index: int
    events: tuple[Event, ...] = ()
    tokens: tuple[TokenText, ...] = ()
    finish: Finish | None = None


class Output(Protocol):
    """Makes the answer of one API out of the outputs of choices. Streamed events are ready bytes, each with its blank line."""

    def opening(self, usage: Usage) -> Iterable[bytes]:
        """The first events, once an engine has begun. ``usage``: of the prompt, as far as it is known."""

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterable[bytes]: ...

    def closing(self, usage: Usage) -> Iterable[bytes]:
        """The last events, when all choices have ended."""

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """The last event of a stream that cannot go on."""

    def keep_alive(self) -> bytes:
        """Something to send when nothing has happened for a while."""

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> msgspec.Struct:
        """The whole answer of a request that is not streamed; one output per choice."""


class BufferFull(Exception):
    """The client reads slower than the model writes, for too long."""


class _Waiting:
    """The events of one choice. Deltas of one segment are joined when they are taken, not when they come: joining is linear so."""

    def __init__(self) -> None:
        self._runs: list[tuple[Event, list[str]]] = []
        self.tokens: list[TokenText] = []
        self.finish: Finish | None = None

    def add(self, event: Event) -> int:
        """How many characters it holds."""
        if not isinstance(event, Text | Reasoning | CallArguments):
            self._runs.append((event, []))
            return 0
        if self._runs and _continues(self._runs[-1][0], event):
            self._runs[-1][1].append(event.text)
        else:
            self._runs.append((event, [event.text]))
        return len(event.text)

    def events(self) -> tuple[Event, ...]:
        return tuple(_joined(event, pieces) for event, pieces in self._runs)


def _continues(before: Event, event: Text | Reasoning | CallArguments) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(before, CallArguments) and before.index == event.index
    return type(before) is type(event)


def _joined(event: Event, pieces: list[str]) -> Event:
    match event:
        case Text() if len(pieces) > 1:
            return Text("".join(pieces))
        case Reasoning() if len(pieces) > 1:
            return Reasoning("".join(pieces))
        case CallArguments(index) if len(pieces) > 1:
            return CallArguments(index, "".join(pieces))
        case _:
            return event


class OutputBuffer:
    """Events of several choices in the order in which the choices came up; what waits of one choice becomes one output."""

    def __init__(self, limit_chars: int) -> None:
        self._limit = limit_chars
        self._choices: dict[int, _Waiting] = {}
        self.chars = 0

    def __bool__(self) -> bool:
        return bool(self._choices)

    def put(self, index: int, events: Iterable[Event], tokens: Sequence[TokenText] = ()) -> None:
        """Raise BufferFull when more than the limit waits."""
        for event in events:
            self.chars += self._of(index).add(event)
        if tokens:
            self._of(index).tokens.extend(tokens)
        if self.chars > self._limit:
            raise BufferFull(f"more than {self._limit} characters wait for the client")

    def finish(self, index: int, finish: Finish) -> None:
        self._of(index).finish = finish

    def take(self) -> list[ChoiceOutput]:
        """Everything that waits; the buffer is empty afterwards."""
        outputs = [
            ChoiceOutput(index, waiting.events(), tuple(waiting.tokens), waiting.finish)
            for index, waiting in self._choices.items()
        ]
        self._choices, self.chars = {}, 0
        return outputs

    def _of(self, index: int) -> _Waiting:
        waiting = self._choices.get(index)
        if waiting is None:
            waiting = self._choices[index] = _Waiting()
        return waiting
