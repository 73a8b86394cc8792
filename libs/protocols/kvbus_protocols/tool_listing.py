"""Tools shown within a conversation: what a search for tools has found, and tools that come later than the first message.

At the top of the prompt a new tool would change everything after it; shown where it comes up, it changes nothing before. The form
is the one that Claude Code's own tool search announces to the model: a ``<functions>`` block, one JSON object per line.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvbus_protocols.conversation import ToolSpec


class ToolListing:
    """Lists the tools of one request. One is shown in full where it comes up first and by its name after that: a request that
    names a tool a thousand times makes no prompt of a thousand tools.

    ``known``: those that a name may stand for.
    """

    def __init__(self, known: Iterable[ToolSpec] = ()) -> None:
        self._known = {tool.name: tool for tool in known}
        self._listed: set[str] = set()

    def of(self, tools: Iterable[ToolSpec]) -> str:
        """Empty for no tools."""
        lines = [f"<function>{msgspec.json.encode(self._entry(tool)).decode()}</function>" for tool in tools]
        return "\n".join(("<functions>", *lines, "</functions>")) if lines else ""

    def of_names(self, names: Iterable[str]) -> str:
        """A tool that is gone by now is named all the same: a refusal would make the whole session unusable."""
        return self.of(self._known.get(name) or ToolSpec(name=name) for name in names)

    def _entry(self, tool: ToolSpec) -> dict[str, Any]:
        if tool.name in self._listed:
            return {"description": "As shown above.", "name": tool.name}
        self._listed.add(tool.name)
        return {"description": tool.description or "", "name": tool.name, "parameters": tool.argument_schema or {}}
