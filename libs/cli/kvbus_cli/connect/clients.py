"""The clients that `kvbus connect` knows, by name."""

from kvbus_cli.connect import aider, claude, codex, openclaw, opencode, pi, qwen
from kvbus_cli.connect.configuration import Client

CLIENTS: dict[str, Client] = {
    module.CLIENT.name: module.CLIENT for module in (claude, codex, openclaw, opencode, qwen, pi, aider)
}
