"""aider: an environment file of its own, and the model's limits in ``.aider.model.metadata.json``."""

from kvbus_cli.connect.configuration import Client, ConfigFile, Configuration, Connection

ENV_FILE = ".aider/kvbus.env"


def configure(connection: Connection) -> Configuration:
    name = f"openai/{connection.model}"
    variables = {"AIDER_MODEL": name, "AIDER_WEAK_MODEL": name, "OPENAI_API_BASE": connection.v1_url}
    limits = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": connection.context_tokens - connection.output_tokens,
        "max_output_tokens": connection.output_tokens,
        "max_tokens": connection.output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    with_key = {**variables, "OPENAI_API_KEY": connection.key.written("${{{}}}")}
    return Configuration(
        command="aider",
        written_command=f"aider --env-file {connection.home}/{ENV_FILE}",
        variables=variables,
        key_variable="OPENAI_API_KEY",
        files=(
            ConfigFile(path=ENV_FILE, format="env", content=with_key, owned=True, instead_of_variables=True),
            ConfigFile(path=".aider.model.metadata.json", content={name: limits}),
        ),
    )


CLIENT = Client(name="aider", title="aider", apis=("chat",), first_prompt_tokens=2_500, configure=configure)
