"""Codex: a provider in ``.codex/config.toml``, and a catalog that tells what the model can do."""

from collections.abc import Sequence
from pathlib import Path

from kvbus_cli.connect.configuration import PROVIDER, Client, ConfigFile, Configuration, Connection
from kvbus_cli.connect.places import place

_KEY_VARIABLE = "LOCAL_LLM_API_KEY"  # not KVBUS_: services refuse names of that kind that they do not know
_COMPACT_AT = 0.8
"""Share of the context at which the history is condensed."""

_INSTRUCTIONS = """\
You are a coding agent. You work in a terminal, in the folder of a user's project, with the tools that you are given.

- Find out before you act: read the files that matter, and search instead of guessing where something is.
- Do what was asked, completely, and nothing else. Keep to the style of the code around your changes.
- Leave alone what others changed.
- Prefer small edits. Never run what destroys work, such as `git reset --hard` or `rm -rf`, unless the user asks for that.
- Check your work: run the tests or the program when there is a way to, and read what they say.
- Before a group of tool calls, say in one short sentence what you are about to do.
- When you are done, or cannot go on, say briefly what you changed, what you checked, and what is open. Name files by their path."""
"""A catalog has to bring the model's instructions."""

_EFFORTS = {
    "minimal": "Hardly any reasoning",
    "low": "Fast answers with little reasoning",
    "medium": "Balances speed and depth",
    "high": "More depth for hard problems",
    "xhigh": "Much more depth",
    "max": "As deep as the model can",
}


def configure(connection: Connection) -> Configuration:
    provider: dict[str, object] = {"name": PROVIDER, "base_url": connection.v1_url, "wire_api": "responses"}
    key = connection.key
    if not key.is_placeholder:
        provider["env_key"] = key.variable or _KEY_VARIABLE
    folder = place(connection.environment, "CODEX_HOME") or Path(".codex")
    catalog = folder / "kvbus-models.json"
    settings = {
        "model": connection.model,
        "model_provider": PROVIDER,
        "model_catalog_json": str(Path(connection.home) / catalog),
        "model_providers": {PROVIDER: provider},
    }
    return Configuration(
        command="codex",
        key_variable=_KEY_VARIABLE if not key.is_placeholder and not key.variable else "",
        files=(
            ConfigFile(path=str(folder / "config.toml"), format="toml", content=settings),
            ConfigFile(path=str(catalog), content={"models": [_catalog_entry(connection)]}, owned=True),
        ),
    )


def _catalog_entry(connection: Connection) -> dict[str, object]:
    """All fields that any version since 0.116 insists on, and those that describe the model."""
    efforts = [effort for effort in connection.efforts if effort in _EFFORTS]
    levels = [{"effort": effort, "description": _EFFORTS[effort]} for effort in efforts]
    default = {"default_reasoning_level": _middle(efforts)} if efforts else {}
    return {
        "slug": connection.model,
        "display_name": connection.model,
        "description": "Served by kvbus.",
        "supported_reasoning_levels": levels,
        **default,
        "supports_reasoning_summaries": connection.reasons,
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "support_verbosity": False,
        "supports_parallel_tool_calls": True,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, connection.context_tokens // 8)},
        "context_window": connection.context_tokens,
        "auto_compact_token_limit": int(connection.context_tokens * _COMPACT_AT),
        "base_instructions": _INSTRUCTIONS,
    }


def _middle(efforts: Sequence[str]) -> str:
    return "medium" if "medium" in efforts else efforts[0]


CLIENT = Client(name="codex", title="Codex", apis=("responses",), first_prompt_tokens=6_000, configure=configure)
