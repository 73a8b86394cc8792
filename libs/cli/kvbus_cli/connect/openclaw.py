"""OpenClaw: a provider in ``.openclaw/openclaw.json``."""

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
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": connection.context_tokens,
        "maxTokens": connection.output_tokens,
    }
    provider = {
        "baseUrl": connection.base_url,
        "apiKey": connection.key.written("${{{}}}"),
        "api": _APIS[connection.api],
        "timeoutSeconds": 600,
        "models": [model],
    }
    settings = {
        "models": {"mode": "merge", "providers": {PROVIDER: provider}},
        "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{connection.model}"}}},
    }
    return Configuration(
        command='openclaw agent --local --agent main --message "..."',
        files=(ConfigFile(path=str(_config_file(connection)), content=settings),),
    )


def _config_file(connection: Connection) -> Path:
    environment = connection.environment
    home = place(environment, "OPENCLAW_HOME", tilde=connection.home)
    tilde = str(home or connection.home)
    named = place(environment, "OPENCLAW_CONFIG_PATH", tilde=tilde)
    folder = place(environment, "OPENCLAW_STATE_DIR", tilde=tilde) or (home or Path()) / ".openclaw"
    return named or folder / "openclaw.json"


CLIENT = Client(
    name="openclaw",
    title="OpenClaw",
    apis=("chat", "responses", "messages"),
    first_prompt_tokens=14_000,
    configure=configure,
)
