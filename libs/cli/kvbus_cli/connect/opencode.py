"""opencode: a provider in ``.config/opencode/opencode.json``."""

from pathlib import Path

from kvbus_cli.connect.configuration import PROVIDER, Client, ConfigFile, Configuration, Connection
from kvbus_cli.connect.places import place

_PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}


def configure(connection: Connection) -> Configuration:
    name = f"{PROVIDER}/{connection.model}"
    model = {
        "name": connection.model,
        "reasoning": connection.reasons,
        "tool_call": True,
        "limit": {"context": connection.context_tokens, "output": connection.output_tokens},
    }
    provider = {
        "npm": _PACKAGES[connection.api],
        "name": PROVIDER,
        # Its package for Messages wants the /v1 that Anthropic's own clients add.
        "options": {"baseURL": connection.v1_url, "apiKey": connection.key.written("{{env:{}}}")},
        "models": {connection.model: model},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {PROVIDER: provider},
    }
    return Configuration(command="opencode", files=(ConfigFile(path=str(_config_file(connection)), content=settings),))


def _config_file(connection: Connection) -> Path:
    """It reads all of them; the first one here wins over the others."""
    environment = connection.environment
    if folder := place(environment, "OPENCODE_CONFIG_DIR"):
        return folder / "opencode.json"
    if named := place(environment, "OPENCODE_CONFIG"):
        return named
    return (place(environment, "XDG_CONFIG_HOME") or Path(".config")) / "opencode" / "opencode.json"


CLIENT = Client(
    name="opencode",
    title="opencode",
    apis=("chat", "responses", "messages"),
    first_prompt_tokens=8_000,
    configure=configure,
)
