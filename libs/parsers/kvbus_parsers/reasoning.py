"""The reasoning formats whose block stands between markers. Formats that own the whole output lie in `formats`."""

from kvbus_parsers.grammar import ReasoningFormat

REASONING_FORMATS = (
    ReasoningFormat("qwen3", ends_on_tool_opener=True),
    ReasoningFormat("deepseek_r1", starts_open=True),
)
REASONING_ALIASES: dict[str, str] = {}
