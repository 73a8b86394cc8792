"""Qwen Code: a model of the provider ``openai`` in ``.qwen/settings.json``."""

from pathlib import Path

from kvbus_cli.connect.configuration import Client, ConfigFile, Configuration, Connection
from kvbus_cli.connect.places import place

_KEY_VARIABLE = "LOCAL_LLM_API_KEY"  # not KVBUS_: services refuse names of that kind that they do not know


def configure(connection: Connection) -> Configuration:
    key = connection.key
    model = {
        "id": connection.model,
        "name": f"{connection.model} (kvbus)",
        "baseUrl": connection.v1_url,
        "envKey": key.variable or _KEY_VARIABLE,
        "generationConfig": {
            "contextWindowSize": connection.context_tokens,
            "samplingParams": {"max_tokens": connection.output_tokens},
        },
    }
    settings = {
        **({} if key.variable else {"env": {_KEY_VARIABLE: key.text}}),
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": connection.model},
    }
    folder = place(connection.environment, "QWEN_HOME", tilde=connection.home) or Path(".qwen")
    return Configuration(command="qwen", files=(ConfigFile(path=str(folder / "settings.json"), content=settings),))


CLIENT = Client(name="qwen", title="Qwen Code", apis=("chat",), first_prompt_tokens=19_000, configure=configure)
