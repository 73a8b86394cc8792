"""Claude Code: variables, or the same in ``.claude/settings.json``."""

from pathlib import Path

from kvbus_cli.connect.configuration import Client, ConfigFile, Configuration, Connection
from kvbus_cli.connect.places import place

_TIERS = ("OPUS", "SONNET", "HAIKU")
"""What sub-agents, plans and small tasks ask for by name."""


def configure(connection: Connection) -> Configuration:
    variables = {
        "ANTHROPIC_BASE_URL": connection.url,
        "ANTHROPIC_MODEL": connection.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": connection.model for tier in _TIERS},
        "ANTHROPIC_SMALL_FAST_MODEL": connection.model,  # what versions before the tiers had a name of its own read
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(connection.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(connection.output_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({} if connection.reasons else {"CLAUDE_CODE_DISABLE_THINKING": "1"}),
    }
    key = connection.key
    if key.variable:  # this file cannot refer to variables, but to a command
        settings = {"env": variables, "apiKeyHelper": f"printenv {key.variable}"}
    else:
        settings = {"env": {**variables, "ANTHROPIC_AUTH_TOKEN": key.text}}
    folder = place(connection.environment, "CLAUDE_CONFIG_DIR") or Path(".claude")
    return Configuration(
        command="claude",
        variables=variables,
        key_variable="ANTHROPIC_AUTH_TOKEN",
        files=(ConfigFile(path=str(folder / "settings.json"), content=settings, instead_of_variables=True),),
    )


CLIENT = Client(name="claude", title="Claude Code", apis=("messages",), first_prompt_tokens=12_000, configure=configure)
