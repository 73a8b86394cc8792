"""Tool calls as Chat Completions shapes them: functions with JSON arguments, custom tools with their text."""

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from kvbus_frontend.core.free_text import FreeText
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event
from kvbus_protocols.chat import AnswerCall, WrittenCall, WrittenInput


class CallDeltas:
    """The calls of one choice, piece by piece. ``custom``: names of the custom tools."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._texts: dict[int, FreeText] = {}
        self.complete = 0

    def delta(self, event: Event) -> AnswerCall | None:
        match event:
            case CallStarted(index, call_id, name) if name in self._custom:
                self._texts[index] = FreeText()
                return AnswerCall(index=index, id=call_id, type="custom", custom=WrittenInput("", name))
            case CallStarted(index, call_id, name):
                return AnswerCall(index=index, id=call_id, type="function", function=WrittenCall("", name))
            case CallArguments(index, text) if index in self._texts:
                return _input(index, self._texts[index].feed(text))
            case CallArguments(index, text):
                return AnswerCall(index=index, function=WrittenCall(text))
            case CallEnded(index):
                self.complete += 1
                return _input(index, self._texts.pop(index).finish(event.arguments)) if index in self._texts else None
        return None


def _input(index: int, text: str) -> AnswerCall | None:
    return AnswerCall(index=index, custom=WrittenInput(text)) if text else None


def whole_call(ended: CallEnded, custom: frozenset[str], *, index: int | UnsetType = UNSET) -> AnswerCall:
    if ended.name in custom:
        text = FreeText().finish(ended.arguments)
        return AnswerCall(index=index, id=ended.id, type="custom", custom=WrittenInput(text, ended.name))
    function = WrittenCall(ended.arguments, ended.name)
    return AnswerCall(index=index, id=ended.id, type="function", function=function)


def whole_calls(events: Iterable[Event], custom: frozenset[str]) -> tuple[list[AnswerCall], int]:
    """All calls of a choice, a cut one with what there is of it, and how many are complete."""
    calls: list[AnswerCall] = []
    cut: CallStarted | None = None
    pieces: list[str] = []
    for event in events:
        match event:
            case CallStarted():
                cut, pieces = event, []
            case CallArguments():
                pieces.append(event.text)
            case CallEnded():
                calls.append(whole_call(event, custom))
                cut = None
    complete = len(calls)
    if cut is not None:
        calls.append(_cut_call(cut, "".join(pieces), custom))
    return calls, complete


def _cut_call(started: CallStarted, arguments: str, custom: frozenset[str]) -> AnswerCall:
    """As a stream that ends here has shown it."""
    if started.name in custom:
        text = FreeText().feed(arguments)
        return AnswerCall(id=started.id, type="custom", custom=WrittenInput(text, started.name))
    return AnswerCall(id=started.id, type="function", function=WrittenCall(arguments, started.name))
