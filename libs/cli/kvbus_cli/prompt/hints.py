"""Why two prompts part, in plain words, as far as it can be told for certain. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvbus_cli.prompt.difference import Difference, PromptText
from kvbus_cli.prompt.tool_changes import named_tools, tool_changes
from kvbus_protocols.prompt_view import PromptView

MAX_CHANGES = 5
LINE_CHARS = 100
DEFERRED = "deferred-tool"
AS_WRITTEN = "call-as-written"

_VOLATILE = re.compile(
    r"""[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}
    |\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{4,}\b
    |\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b
    |\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b
    |\d+""",
    re.VERBOSE,
)
"""Ids, dates and numbers."""
_THOUGHT = re.compile(
    r"(?:\.(?:thinking|reasoning|reasoning_content|encrypted_content|signature)|\.summary\[\d+\]\.text)\Z"
)
_TOOL = re.compile(r"tools\[")


class Compared(msgspec.Struct, frozen=True):
    """Two requests with their prompts."""

    fields_a: Mapping[str, Any]
    fields_b: Mapping[str, Any]
    a: PromptView
    b: PromptView
    difference: Difference


Hint = Callable[[Compared], Iterator[str]]


def hints(compared: Compared) -> list[str]:
    """The weightiest first; where no reason can be told, what has changed."""
    found = [text for hint in _HINTS for text in hint(compared)]
    return list(dict.fromkeys(found or _changed(compared)))


def _separate_caches(compared: Compared) -> Iterator[str]:
    a, b = compared.a, compared.b
    if a.domain == b.domain:
        return
    if a.served_model != b.served_model:
        yield f"the models differ ({a.served_model}, {b.served_model}): nothing is shared between models"
    elif a.salted or b.salted:
        yield "cache_salt differs: requests with different salts share no block, however equal their prompts are"
    else:
        yield "the caches are separate: the model's fingerprint or the layout of its blocks is another one"


def _same(compared: Compared) -> Iterator[str]:
    found = compared.difference
    if found.is_none:
        yield "the prompts are the same"
    elif found.common_tokens == found.a.tokens:
        yield "A is the beginning of B"
    elif found.common_tokens == found.b.tokens:
        yield "B is the beginning of A"


def _answer_began(compared: Compared) -> Iterator[str]:
    found = compared.difference
    if found.a.source is None and not found.a.is_end and found.a.before is None and found.b.before is not None:
        yield f"A asks for an answer here, B goes on with {found.b.before}: all of A's messages are shared"


def _tools(compared: Compared) -> Iterator[str]:
    a, b = compared.difference.a, compared.difference.b
    around = (a.source, b.source) if a.source and b.source else (a.source, b.source, a.before, b.before)
    if not any(place and _TOOL.match(place) for place in around):
        return
    tools_a, tools_b = (
        named_tools(fields, frozenset(rule.source for rule in view.rules if rule.rule == DEFERRED and rule.source))
        for fields, view in ((compared.fields_a, compared.a), (compared.fields_b, compared.b))
    )
    changes = tool_changes(tools_a, tools_b)
    yield from (f"tools: {change}" for change in changes[:MAX_CHANGES])
    if len(changes) > MAX_CHANGES:
        yield f"tools: {len(changes) - MAX_CHANGES} more changes"


def _volatile_line(compared: Compared) -> Iterator[str]:
    found = compared.difference
    if found.a.is_end or found.b.is_end:
        return
    a, b = (PromptText(view.segments).line(found.char) for view in (compared.a, compared.b))
    if a != b and _VOLATILE.sub("#", a) == _VOLATILE.sub("#", b):
        yield f'a volatile line: "{_short(a)}" and "{_short(b)}" differ in ids, dates or numbers only'


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 1]}…"


def _dropped(compared: Compared) -> Iterator[str]:
    a, b = compared.a, compared.b
    for here, there, name_here, name_there in ((a, b, "A", "B"), (b, a, "B", "A")):
        shown = {segment.source for segment in here.segments if segment.source is not None}
        lost = [path for path in there.not_shown if path in shown]
        thoughts = [path for path in lost if _THOUGHT.search(path)]
        if thoughts:
            yield f"thinking: {_listed(thoughts)} is shown in {name_here}; in {name_there} the template drops it"
        if others := [path for path in lost if path not in thoughts]:
            yield f"{_listed(others)} is shown in {name_here} and not in {name_there}"


def _listed(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} (and {len(paths) - 1} more)"


def _calls(compared: Compared) -> Iterator[str]:
    """``source``: of a call's arguments, or of the whole call."""
    places = {compared.difference.a.source, compared.difference.b.source}
    for view, other, name, other_name in ((compared.a, compared.b, "A", "B"), (compared.b, compared.a, "B", "A")):
        written = {rule.source for rule in view.rules if rule.rule == AS_WRITTEN}
        written -= {rule.source for rule in other.rules if rule.rule == AS_WRITTEN}
        if any(place and call and place.startswith(call) for place in places for call in written):
            yield f"the call stands in {name} as the model wrote it, and in {other_name} as its client has it"


def _white_space(compared: Compared) -> Iterator[str]:
    for place_a, place_b in (
        (compared.difference.a.after, compared.difference.b.after),
        (compared.difference.a.before, compared.difference.b.before),
    ):
        a, b = value_at(compared.fields_a, place_a), value_at(compared.fields_b, place_b)
        if isinstance(a, str) and isinstance(b, str) and a != b and a.strip() == b.strip():
            yield f"{place_a} and B's {place_b} differ in the white space at their ends only"


def _programs(compared: Compared) -> Iterator[str]:
    a, b = compared.a, compared.b
    if a.api != b.api:
        yield f"the requests are of two APIs ({a.api}, {b.api})"
    if a.harness != b.harness:
        yield f"the requests are of two programs ({a.harness or 'unknown'}, {b.harness or 'unknown'})"


def _tokens_first(compared: Compared) -> Iterator[str]:
    """A tokenizer may look ahead, and one text may have two tokenizations."""
    found = compared.difference
    if found.a.is_end and found.b.is_end and not found.is_none:
        yield "the texts are the same and the tokens are not: tokens were given, or control tokens are spelled out as text"


def _changed(compared: Compared) -> Iterator[str]:
    a, b = compared.difference.a, compared.difference.b
    if a.source is not None and a.source == b.source:
        yield f"{a.source} has changed"
    elif a.source is not None or b.source is not None:
        yield f"A goes on with {a.place}, B with {b.place}"


_HINTS: tuple[Hint, ...] = (
    _separate_caches, _same, _tools, _volatile_line, _dropped, _calls, _white_space, _answer_began, _tokens_first, _programs,
)  # fmt: skip


def value_at(fields: Mapping[str, Any], path: str | None) -> Any:
    """The value at a path such as ``messages[4].content[0].text``; None when there is none."""
    value: Any = fields
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path or ""):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value if path else None
