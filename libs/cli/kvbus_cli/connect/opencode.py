"""opencode: a provider in ``.config/opencode/opencode.json``."""

from kvbus_cli.connect.configuration import PROVIDER, Client, ConfigFile, Configuration, Connection

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
    return Configuration(
        command="opencode", files=(ConfigFile(path=".config/opencode/opencode.json", content=settings),)
    )


CLIENT = Client(
    name="opencode",
    title="opencode",
    apis=("chat", "responses", "messages"),
    first_prompt_tokens=8_000,
    configure=configure,
)
