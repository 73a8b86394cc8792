"""Where clients read their files: below a home, or where an environment variable of theirs says."""

from collections.abc import Mapping
from pathlib import Path

VARIABLES = (
    "CLAUDE_CONFIG_DIR",
    "CODEX_HOME",
    "OPENCLAW_CONFIG_PATH",
    "OPENCLAW_HOME",
    "OPENCLAW_STATE_DIR",
    "OPENCODE_CONFIG",
    "OPENCODE_CONFIG_DIR",
    "PI_CODING_AGENT_DIR",
    "QWEN_HOME",
    "XDG_CONFIG_HOME",
)
"""All that are heeded."""


def place(environment: Mapping[str, str], variable: str, *, tilde: str = "") -> Path | None:
    """What the variable names, None when it is unset. ``tilde``: the folder that clients which expand it take for ``~``."""
    text = environment.get(variable, "")
    if tilde:
        text = text.strip()
        if text == "~" or text.startswith("~/"):
            text = tilde + text[1:]
    return Path(text).absolute() if text else None
