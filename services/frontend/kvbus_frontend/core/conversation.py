"""Turns and tools in the shape that chat templates expect.

A turn of the assistant keeps the order in which it was said as far as the template can write it: it becomes several messages where
a thought or text follows a call, or where the template takes one call per message, or no text beside calls. What the template
cannot write in order it writes out of order; nothing is dropped here.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbus_frontend.core.message_style import MessageStyle, ThinkMarkers
from kvbus_frontend.core.written_calls import WrittenCall, member_texts
from kvbus_protocols.conversation import (
    CUSTOM_INPUT,
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    Turn,
)
from kvbus_tokenizers import WrittenObject, WrittenValue

OMITTED = "[{what} omitted: this model reads text only]"

Message = dict[str, Any]
FindWritten = Callable[[str, str, str], WrittenCall | None]
"""By id, name and arguments of a call: how the model wrote it."""


def nothing_written(call_id: str, name: str, arguments: str) -> None:
    return None


def template_messages(
    turns: Sequence[Turn], style: MessageStyle, find_written: FindWritten = nothing_written
) -> list[Message]:
    writer = _Writer(style, find_written)
    for turn in turns:
        writer.add(turn)
    return writer.finish()


def template_tools(tools: Sequence[ToolSpec]) -> list[Message] | None:
    """Of the top of the prompt, so without those that the conversation itself shows."""
    return [{"type": "function", "function": _function(tool)} for tool in tools if not tool.deferred] or None


def _function(tool: ToolSpec) -> Message:
    function: Message = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.argument_schema is not None:
        function["parameters"] = tool.argument_schema
    return function


class _Writer:
    def __init__(self, style: MessageStyle, find_written: FindWritten) -> None:
        self._style = style
        self._traits = style.traits
        self._find_written = find_written
        self._messages: list[Message] = []
        self._said: list[Message] = []  # by the assistant, whose results may follow
        self._results: list[tuple[ToolResultPart, str | None]] = []
        self._ids: dict[str, str] = {}  # of calls: the client's to the template's
        self._names: dict[str, str] = {}
        self._calls = 0

    def add(self, turn: Turn) -> None:
        if turn.role == "tool":
            self._results += [(part, turn.name) for part in turn.parts if isinstance(part, ToolResultPart)]
            return
        if turn.role != "assistant" or self._results:
            self._flush()
        if turn.role == "assistant":
            self._said += [_named(message, turn.name) for message in self._assistant(turn.parts)]
        else:
            self._messages.append(_named({"role": turn.role, "content": _text(turn.parts)}, turn.name))

    def finish(self) -> list[Message]:
        self._flush()
        return self._messages

    # results

    def _flush(self) -> None:
        """Results come in the order of their calls, each behind its own message where the template takes one call per message."""
        order = [call["id"] for message in self._said for call in message.get("tool_calls", ())]
        places = {call_id: place for place, call_id in reversed([*enumerate(order)])}
        results = [self._result(part, name) for part, name in self._results]
        results.sort(key=lambda result: places.get(result["tool_call_id"], len(order)))
        waiting: dict[str, list[Message]] = {}
        for result in results:
            waiting.setdefault(result["tool_call_id"], []).append(result)
        for message in self._said:
            self._messages.append(message)
            if not self._traits.parallel:
                for call in message.get("tool_calls", ()):
                    self._messages += waiting.pop(call["id"], [])
        self._messages += (result for result in results if result["tool_call_id"] in waiting)
        self._said, self._results = [], []

    def _result(self, part: ToolResultPart, name: str | None) -> Message:
        call_id = self._ids.get(part.call_id)
        if call_id is None:
            call_id = self._style.call_id(part.call_id, name or "", self._calls)
        result = {"role": "tool", "tool_call_id": call_id, "content": _text(part.parts)}
        return _named(result, self._names.get(part.call_id, name))

    # what the assistant said

    def _assistant(self, parts: Sequence[Part]) -> list[Message]:
        steps = self._steps(parts) if self._traits.successive else [list(parts)]
        return [message for step in steps for message in self._step(step)]

    def _steps(self, parts: Sequence[Part]) -> list[list[Part]]:
        """A step is thoughts and text, then calls."""
        one_thought = bool(self._traits.fields)
        steps: list[list[Part]] = [[]]
        for part in parts:
            before = steps[-1]
            behind_call = bool(before) and isinstance(before[-1], ToolCallPart)  # nothing else ends a step with calls
            if isinstance(part, TextPart) and not part.text.strip() and behind_call:
                continue  # white space beside a call is framing
            follows_call = behind_call and not isinstance(part, ToolCallPart)
            if follows_call or (one_thought and before and isinstance(part, ReasoningPart)):
                steps.append([])
            steps[-1].append(part)
        return steps

    def _step(self, parts: list[Part]) -> list[Message]:
        calls = [self._call(part) for part in _calls(parts)]
        words = [part for part in parts if not isinstance(part, ToolCallPart)]
        message = self._words(words)
        if not calls:
            return [message]
        messages: list[Message] = []
        if message["content"] and not self._traits.text_with_calls and self._traits.text_apart:
            messages.append(message)
            message = {"role": "assistant", "content": self._traits.empty_content}
            if not self._traits.thought_apart:
                message |= {field: messages[0].pop(field) for field in self._traits.fields if field in messages[0]}
        elif (
            message["content"]
            and any(field in message for field in self._traits.fields)
            and not self._traits.thought_with_both
        ):
            for field in self._traits.fields:
                message[field] = f"{message[field]}\n\n{message['content']}"
            message["content"] = self._traits.empty_content
        if not message["content"]:
            message["content"] = self._traits.empty_content
        groups = [calls] if self._traits.parallel else [[call] for call in calls]
        messages.append({**message, "tool_calls": groups[0]})
        bare = {"role": "assistant", "content": self._traits.empty_content}
        return [*messages, *({**bare, "tool_calls": group} for group in groups[1:])]

    def _words(self, parts: Sequence[Part]) -> Message:
        """A message with thoughts and text."""
        thoughts = [part.text for part in parts if isinstance(part, ReasoningPart)]
        message: Message = {"role": "assistant"}
        if self._traits.fields:
            text = _text(parts)
            if thoughts:
                message |= dict.fromkeys(self._traits.fields, "\n\n".join(thoughts))
            elif self._style.markers is not None and self._style.markers.closer in text:
                message |= dict.fromkeys(
                    self._traits.fields, ""
                )  # keeps the template from looking for a thought in the text
        elif self._traits.blocks and thoughts:
            return {**message, "content": [_block(part) for part in parts]}
        elif thoughts and self._traits.inline and self._style.markers is not None:
            text = _inline(parts, self._style.markers)
        else:
            text = _text(parts)
        return {**message, "content": text}

    def _call(self, part: ToolCallPart) -> Message:
        arguments = json.dumps({CUSTOM_INPUT: part.arguments}, ensure_ascii=False) if part.custom else part.arguments
        written = self._find_written(part.id, part.name, arguments)
        call_id = self._style.call_id(written.id if written is not None else part.id, part.name, self._calls)
        self._ids[part.id], self._names[part.id] = call_id, part.name
        self._calls += 1
        given = self._as_written(written) if written is not None else _arguments(arguments)
        return {"id": call_id, "type": "function", "function": {"name": part.name, "arguments": given}}

    def _as_written(self, call: WrittenCall) -> WrittenObject:
        values = _values(call.arguments) or {}
        texts = call.written
        if texts is None and self._traits.values_as_json:
            texts = member_texts(call.arguments)
        if texts is not None:
            values = {
                key: values[key] if isinstance(values.get(key), str) else WrittenValue(texts[key]) for key in texts
            }
        return WrittenObject(values, call.arguments)


def _named(message: Message, name: str | None) -> Message:
    return message if name is None else {**message, "name": name}


def _calls(parts: Sequence[Part]) -> list[ToolCallPart]:
    return [part for part in parts if isinstance(part, ToolCallPart)]


def _text(parts: Sequence[Part]) -> str:
    """No content is empty content: many templates add it to other text without a look."""
    return "\n".join(_shown(part) for part in parts if isinstance(part, TextPart | ImagePart))


def _shown(part: TextPart | ImagePart) -> str:
    if isinstance(part, TextPart):
        return part.text
    return OMITTED.format(what="image" if part.what.startswith("image") else "document")


def _inline(parts: Sequence[Part], markers: ThinkMarkers) -> str:
    return "".join(markers.around(part.text) if isinstance(part, ReasoningPart) else _text([part]) for part in parts)


def _block(part: Part) -> Message:
    if isinstance(part, ReasoningPart):
        return {"type": "thinking", "thinking": part.text}
    return {"type": "text", "text": _text([part])}


def _arguments(text: str) -> WrittenObject:
    """In the canonical form, which is the template's own; what is no JSON object stays as it is, and fails no template."""
    values = _values(text or "{}")
    return WrittenObject({}, text) if values is None else WrittenObject(values)


def _values(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
