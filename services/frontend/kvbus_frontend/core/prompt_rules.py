"""What makes a prompt another than its request says, in the words of `kvbus_protocols.prompt_view`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbus_frontend.core.field_marks import paths_of
from kvbus_frontend.core.stability import Change
from kvbus_frontend.core.template_limits import TemplateLimits, fitted
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.prompt_view import PromptRule


def stability_rules(document: Mapping[str, Any], changes: Sequence[Change]) -> Iterator[PromptRule]:
    places_of = paths_of(document, {change.before for change in changes})
    for change in changes:
        places = places_of[change.before]
        text = (
            _removed(change.before, change.after)
            if change.after != change.before
            else "moved to where more requests share it, or what comes before it"
        )
        yield PromptRule(rule=change.rule, source=places[0] if len(places) == 1 else None, text=text)


def conversation_rules(
    document: Mapping[str, Any], given: Conversation, shown: Conversation, limits: TemplateLimits
) -> Iterator[PromptRule]:
    """``given``: as prompt stability leaves it; ``shown``: as it was rendered."""
    paths = _tool_paths(document)
    for tool in shown.tools:
        if tool.deferred:
            text = f'the tool "{tool.name}" is shown where the conversation loads it'
            yield PromptRule(rule="deferred-tool", source=paths.get(tool.name), text=text)
    if (left_out := len(given.turns) - len(shown.turns)) > 0:
        yield PromptRule(rule="truncation", text=f"{left_out} of the oldest turns left out")
    if fitted(shown.turns, limits) != shown.turns:
        text = (
            "the template refuses or drops messages in this order: some are joined, or are notes within user messages"
        )
        yield PromptRule(rule="template-limits", text=text)


def changed_texts(changes: Sequence[Change]) -> dict[str, str]:
    """What each text became in the end."""
    changed: dict[str, str] = {}
    origins: defaultdict[str, list[str]] = defaultdict(list)
    for change in changes:
        if change.after != change.before:
            origin = origins[change.before].pop() if origins[change.before] else change.before
            changed[origin] = change.after
            origins[change.after].append(origin)
    return changed


def _removed(before: str, after: str) -> str:
    """What of the text is gone, from the first to the last place at which something is."""
    start = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    end = 0
    while end < len(after) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    return before[start : len(before) - end].strip()


def _tool_paths(document: Mapping[str, Any]) -> dict[str, str]:
    """Of the tools whose name no other one has."""
    found: dict[str, list[str]] = {}

    def walk(value: Any, path: str, *, is_tools: bool) -> None:
        for i, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, dict):
                continue
            inner = next((item[key] for key in ("function", "custom") if isinstance(item.get(key), dict)), item)
            if is_tools and item.get("type") != "namespace" and isinstance(inner.get("name"), str):
                found.setdefault(inner["name"], []).append(f"{path}[{i}]")
            walk(item.get("tools"), f"{path}[{i}].tools", is_tools=True)

    for name, value in document.items():
        walk(value, name, is_tools=name.endswith("tools"))
    return {name: places[0] for name, places in found.items() if len(places) == 1}
