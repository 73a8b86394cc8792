"""How the tools of two requests differ, in words. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CACHE_MARK = "cache_control"

Tools = Mapping[str, Any]
"""Tools by name, in their order."""


def named_tools(fields: Mapping[str, Any], left_out: frozenset[str] = frozenset()) -> Tools:
    """Of a request of any API; those in namespaces by their bare name. ``left_out``: paths of tools that are not meant."""
    return {name: tool for path, name, tool in _tools(fields.get("tools"), "tools") if path not in left_out}


def _tools(given: Any, where: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for i, tool in enumerate(given if isinstance(given, list) else ()):
        path = f"{where}[{i}]"
        if not isinstance(tool, dict):
            continue
        if tool.get("type") == "namespace":
            yield from _tools(tool.get("tools"), f"{path}.tools")
            continue
        inner = next((tool[key] for key in ("function", "custom") if isinstance(tool.get(key), dict)), tool)
        if isinstance(inner.get("name"), str):
            yield path, inner["name"], inner


def tool_changes(a: Tools, b: Tools) -> list[str]:
    """What was done to A's tools to get B's."""
    names_a, names_b = list(a), list(b)
    changes = [f'a tool "{name}" was {_place(name, names_b, a)}' for name in names_b if name not in a]
    changes += [f'the tool "{name}" is gone' for name in names_a if name not in b]
    both_a, both_b = [name for name in names_a if name in b], [name for name in names_b if name in a]
    if both_a != both_b:
        first = next(name for name, other in zip(both_b, both_a, strict=True) if name != other)
        changes.append(f'the tools moved: their order is another one from "{first}" on')
    for name in both_b:
        if parts := changed_parts(a[name], b[name]):
            changes.append(f'the tool "{name}" changed: {", ".join(parts)}')
    if not changes and any(_members(a[name]) != _members(b[name]) for name in both_b):
        changes.append("the tools are the same, with their members in another order")
    return changes


def _members(tool: Mapping[str, Any]) -> list[str]:
    return [key for key in tool if key != CACHE_MARK]


def _place(name: str, names: Sequence[str], known: Tools) -> str:
    at = names.index(name)
    if all(other not in known for other in names[at:]):
        return "added at the end"
    return f'inserted after "{names[at - 1]}"' if at else "inserted before all others"


def changed_parts(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths of the members that differ, without where clients put cache marks."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in dict.fromkeys([*a, *b]) if key != CACHE_MARK]
        return [
            part
            for key in keys
            for part in changed_parts(a.get(key), b.get(key), f"{where}.{key}".removeprefix("."))
        ]  # fmt: skip
    return [] if a == b else [where or "all of it"]
