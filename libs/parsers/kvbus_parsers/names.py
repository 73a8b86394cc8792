"""All formats by name and alias, as vLLM, SGLang and Dynamo call them.

Each module in `formats` says what it has: ``FORMATS`` (tool formats), ``REASONING`` (reasoning formats), and ``ALIASES`` and
``REASONING_ALIASES`` (alias to name); all four are optional. Names are written in small letters with underscores. The modules are
imported when a name is first looked up.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache

from kvbus_parsers import formats, reasoning
from kvbus_parsers.grammar import ReasoningFormat, ToolFormat


class UnknownFormatError(LookupError):
    """There is no format of this name."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"unknown {kind} format: {name!r}")
        self.kind = kind
        self.name = name


def tool_format(name: str) -> ToolFormat:
    """The tool-call format of this name or alias. Raises `UnknownFormatError`."""
    found = tool_formats().get(_normal(name))
    if found is None:
        raise UnknownFormatError("tool-call", name)
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of this name or alias. Raises `UnknownFormatError`."""
    found = reasoning_formats().get(_normal(name))
    if found is None:
        raise UnknownFormatError("reasoning", name)
    return found


def _normal(name: str) -> str:
    """Names are compared without case, and without regard to how their words are joined."""
    return name.lower().replace("-", "_").replace(".", "_")


@lru_cache(maxsize=1)
def tool_formats() -> Mapping[str, ToolFormat]:
    """Every tool-call format under its name and its aliases."""
    found: dict[str, ToolFormat] = {}
    aliases: dict[str, str] = {}
    for module in _modules():
        found |= {known.name: known for known in getattr(module, "FORMATS", ())}
        aliases |= getattr(module, "ALIASES", {})
    return found | {_normal(alias): found[name] for alias, name in aliases.items()}


@lru_cache(maxsize=1)
def reasoning_formats() -> Mapping[str, ReasoningFormat]:
    """Every reasoning format under its name and its aliases."""
    found = {known.name: known for known in reasoning.REASONING_FORMATS}
    aliases = dict(reasoning.REASONING_ALIASES)
    for module in _modules():
        found |= {known.name: known for known in getattr(module, "REASONING", ())}
        aliases |= getattr(module, "REASONING_ALIASES", {})
    return found | {_normal(alias): found[name] for alias, name in aliases.items()}


@lru_cache(maxsize=1)
def _modules() -> tuple[object, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    return tuple(importlib.import_module(f"{formats.__name__}.{name}") for name in names)
