"""Tools shown within a conversation: what a search for tools has found, and tools that come later than the first message.

At the top of the prompt a new tool would change everything after it; shown where it comes up, it changes nothing before. The form
is the one that Claude Code's own tool search announces to the model: a ``<functions>`` block, one JSON object per line.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvbus_protocols.conversation import ToolSpec


def tool_listing(tools: Iterable[ToolSpec]) -> str:
    """Empty for no tools."""
    lines = [f"<function>{msgspec.json.encode(_shown(tool)).decode()}</function>" for tool in tools]
    return "\n".join(("<functions>", *lines, "</functions>")) if lines else ""


def _shown(tool: ToolSpec) -> dict[str, Any]:
    return {"description": tool.description or "", "name": tool.name, "parameters": tool.argument_schema or {}}
