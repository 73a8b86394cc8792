"""pi: a provider in ``.pi/agent/models.json``, chosen in ``.pi/agent/settings.json``."""

from pathlib import Path

from kvbus_cli.connect.configuration import PROVIDER, Client, ConfigFile, Configuration, Connection
from kvbus_cli.connect.places import place

_APIS = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}


def configure(connection: Connection) -> Configuration:
    model = {
        "id": connection.model,
        "name": connection.model,
        "reasoning": connection.reasons,
        "input": ["text"],
        "contextWindow": connection.context_tokens,
        "maxTokens": connection.output_tokens,
    }
    provider = {
        "baseUrl": connection.base_url,
        "api": _APIS[connection.api],
        "apiKey": connection.key.written("{}"),  # it tries the name of a variable first
        "models": [model],
    }
    folder = place(connection.environment, "PI_CODING_AGENT_DIR", tilde=connection.home) or Path(".pi/agent")
    return Configuration(
        command="pi",
        files=(
            ConfigFile(path=str(folder / "models.json"), content={"providers": {PROVIDER: provider}}),
            ConfigFile(
                path=str(folder / "settings.json"),
                content={"defaultProvider": PROVIDER, "defaultModel": connection.model},
            ),
        ),
    )


CLIENT = Client(
    name="pi", title="pi", apis=("chat", "responses", "messages"), first_prompt_tokens=1_500, configure=configure
)
