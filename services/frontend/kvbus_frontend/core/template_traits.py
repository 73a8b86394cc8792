"""What a chat template makes of the assistant's turns: where it reads thoughts, and what it writes beside tool calls.

Templates differ in this, and what they cannot write they drop without a word. It is found by trying, once, when the model is
loaded: small conversations are rendered, and the texts in them looked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbus_tokenizers import ChatTemplate, TemplateFailed, WrittenObject

FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
"""The names under which templates look for thoughts in a message."""

_EVERYTHING: Mapping[str, Any] = {
    "enable_thinking": True,
    "thinking": True,
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
    "drop_thinking": False,
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "d"}}, "required": ["k"]},
        },
    }
    for name in ("kone", "ktwo")
]  # fmt: skip
_ARGUMENTS = WrittenObject({"k": "v"}, '{"k": "v"}')
_LONG_ID = "call_0123456789abcdef"
_ASKS: Mapping[str, Any] = {"role": "user", "content": "k-question"}

Message = Mapping[str, Any]


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of a template that writes everything but thoughts.

    ``fields``: of FIELDS, those whose text it writes. ``blocks``: content may be a list, with thoughts as blocks in it. ``inline``:
    thoughts within text are written, not cut out.
    ``empty_content``: what a message that has calls only must hold as content: text, or None.
    ``text_with_calls``: text stands before the calls of its message; ``thought_with_both``: and a thought before that.
    ``text_apart``: text may stand in a message of its own before the one with the calls; ``thought_apart``: and a thought there.
    ``successive``: several messages with calls in a row; ``parallel``: several calls in a message.
    ``values_as_json``: it goes through a call's arguments one by one, and writes what is no string as JSON.
    ``short_ids``: call ids must be nine letters or digits. ``variables``: names that it takes from the request.
    """

    fields: tuple[str, ...] = ()
    blocks: bool = False
    inline: bool = True
    empty_content: str | None = ""
    text_with_calls: bool = True
    thought_with_both: bool = True
    text_apart: bool = True
    thought_apart: bool = True
    successive: bool = True
    parallel: bool = True
    values_as_json: bool = False
    short_ids: bool = False
    variables: frozenset[str] = frozenset()


def traits_of(template: ChatTemplate | None) -> TemplateTraits:
    if template is None:
        return TemplateTraits()
    trial = _Trial(template)
    calls = trial.empty_content()
    if calls is None:  # it knows no calls at all
        return TemplateTraits(
            fields=trial.fields([], ""),
            inline=trial.keeps_inline(),
            successive=trial.shows([_ASKS, _says("k-one"), _says("k-two")], "k-one", "k-two"),
            variables=template.variables,
        )
    [empty] = calls
    first, second = _call("kone"), _call("ktwo")
    fields = trial.fields([first], empty)
    thought = dict.fromkeys(fields, "k-thought")
    results = [_result("kone"), _result("ktwo")]
    return TemplateTraits(
        fields=fields,
        blocks=not fields and trial.takes_blocks(),
        inline=trial.keeps_inline(first),
        empty_content=empty,
        text_with_calls=trial.shows([_ASKS, _says("k-text", first), _result("kone")], "k-text", "kone"),
        thought_with_both=trial.shows(
            [_ASKS, _says("k-text", first, **thought), _result("kone")], *(["k-thought"] if fields else []), "k-text", "kone"
        ),
        text_apart=trial.shows(
            [_ASKS, _says("k-text"), _says(empty, first), _result("kone"), _says("k-more"), _ASKS],
            "k-text", "kone", "k-more",
        ),
        thought_apart=trial.shows(
            [_ASKS, _says("k-text", **thought), _says(empty, first), _result("kone")],
            *(["k-thought"] if fields else []), "k-text", "kone",
        ),
        successive=trial.shows([_ASKS, _says(empty, first), _says(empty, second), *results], "kone", "ktwo"),
        parallel=trial.shows([_ASKS, _says(empty, first, second), *results], "kone", "ktwo"),
        values_as_json=trial.writes_values_as_json(empty),
        short_ids=not trial.shows([_ASKS, _says(empty, _call("kone", _LONG_ID)), _result("kone", _LONG_ID)], "kone"),
        variables=template.variables,
    )  # fmt: skip


class _Trial:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def rendered(self, messages: Sequence[Message], variables: Mapping[str, Any] = _EVERYTHING) -> str:
        """Without what stands before the first message; empty when the template refuses the messages."""
        try:
            segments = self._template.render(messages, tools=_TOOLS, variables=variables)
        except TemplateFailed:
            return ""
        return "".join(segment.text for segment in segments).partition("k-question")[2]

    def shows(self, messages: Sequence[Message], *texts: str) -> bool:
        """Whether the texts are all there, in this order."""
        rendered, position = self.rendered(messages), 0
        for text in texts:
            position = rendered.find(text, position)
            if position < 0:
                return False
            position += len(text)
        return True

    def empty_content(self) -> tuple[str | None] | None:
        """The content with which a message's calls are written; None when they never are."""
        for content in ("", None):
            if self.shows([_ASKS, _says(content, _call("kone")), _result("kone")], "kone"):
                return (content,)
        return None

    def fields(self, calls: list[dict[str, Any]], empty: str | None) -> tuple[str, ...]:
        """Tried with a call, around which thoughts are kept, and in the last message."""
        texts = {field: f"k-{field}." for field in FIELDS}
        in_loop = self.rendered([_ASKS, _says(empty, *calls, **texts), _result("kone")]) if calls else ""
        at_end = self.rendered([_ASKS, _says("k-text", **texts)])
        return tuple(field for field in FIELDS if texts[field] in in_loop + at_end)

    def writes_values_as_json(self, empty: str | None) -> bool:
        whole = '{"k":   {"n": 1}}'
        arguments = WrittenObject({"k": {"n": 1}}, whole)
        rendered = self.rendered([_ASKS, _says(empty, _call("kone", arguments=arguments)), _result("kone")])
        return whole not in rendered and '{"n": 1}' in rendered

    def keeps_inline(self, *calls: dict[str, Any]) -> bool:
        text = "<think>\nk-thought\n</think>\n\nk-text"
        beside_call = bool(calls) and self.shows([_ASKS, _says(text, *calls), _result("kone")], "k-thought")
        return beside_call or self.shows([_ASKS, _says(text)], "k-thought")

    def takes_blocks(self) -> bool:
        blocks = [{"type": "thinking", "thinking": "k-thought"}, {"type": "text", "text": "k-text"}]
        messages = [_ASKS, {"role": "assistant", "content": blocks}]
        as_list = self.rendered(messages)  # which a template that knows no blocks may write as it is
        return self.shows(messages, "k-thought", "k-text") and not ("'type'" in as_list or '"type"' in as_list)


def _says(content: str | None, *calls: dict[str, Any], **thought: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", **thought, "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def _call(name: str, call_id: str = "", *, arguments: WrittenObject = _ARGUMENTS) -> dict[str, Any]:
    return {"id": call_id or f"{name}00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(name: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id or f"{name}00000", "name": name, "content": "r"}
