"""pi: a provider in ``.pi/agent/models.json``, chosen in ``.pi/agent/settings.json``."""

from kvbus_cli.connect.configuration import PROVIDER, Client, ConfigFile, Configuration, Connection

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
    return Configuration(
        command="pi",
        files=(
            ConfigFile(path=".pi/agent/models.json", content={"providers": {PROVIDER: provider}}),
            ConfigFile(
                path=".pi/agent/settings.json", content={"defaultProvider": PROVIDER, "defaultModel": connection.model}
            ),
        ),
    )


CLIENT = Client(
    name="pi", title="pi", apis=("chat", "responses", "messages"), first_prompt_tokens=1_500, configure=configure
)
