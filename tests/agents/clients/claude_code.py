"""Claude Code: `claude -p` over the Messages API, with the variables that `kvbus connect claude` gives."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbus_cli.connect.claude import CLIENT
from kvbus_cli.connect.configuration import Connection
from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of

_UNKNOWN_MODEL = "[claude-code:unrecognized_model]"
"""Said of each model that is not its vendor's."""


class ClaudeCode(msgspec.Struct, frozen=True):
    version: str
    name: str = "claude-code"

    def __str__(self) -> str:
        return self.version

    def configure(self, site: Site) -> None:
        project = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True, "allowedTools": []}
        settings = {
            "hasCompletedOnboarding": True,
            "theme": "dark",
            "bypassPermissionsModeAccepted": True,
            "projects": {str(site.project): project},
        }
        (site.home / ".claude.json").write_text(json.dumps(settings))

    def environment(self, site: Site) -> Mapping[str, str]:
        connection = Connection(
            url=site.url,
            model=site.model,
            context_tokens=site.context_length,
            output_tokens=32_000,
            home=str(site.home),
            api="messages",
            reasons=True,
        )
        return {
            **CLIENT.configure(connection).variables,
            "ANTHROPIC_AUTH_TOKEN": "local",
            "DISABLE_TELEMETRY": "1",
            # Tools may run without asking, also as root, only where that is declared harmless.
            "IS_SANDBOX": "1",
        }

    def terminal_command(self) -> list[str]:
        return [self._binary, "--dangerously-skip-permissions"]

    @property
    def _binary(self) -> str:
        return str(folder_of(self.name, self.version) / "node_modules" / ".bin" / "claude")

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        return [self._binary, *(["--continue"] if resume else []), "--dangerously-skip-permissions", "-p", prompt]

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        rows = [row for row in outcome.stderr.splitlines() if row.strip()]
        return [row for row in rows if not row.startswith(_UNKNOWN_MODEL)]

    def write(self, file: Path, content: str) -> Call:
        return Call("Write", {"file_path": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("Read", {"file_path": str(file)})

    def shell(self, command: str) -> Call:
        return Call("Bash", {"command": command, "description": "Run it"})


ALL = tuple(ClaudeCode(version) for version in versions_of("claude-code"))
