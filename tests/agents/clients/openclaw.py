"""OpenClaw: its agent without its gateway, over each of the three APIs."""

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbus_cli.connect import command as connect
from kvbus_cli.connect.configuration import PROVIDER, Api
from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of

_OF_THE_MACHINE = re.compile(r"\[(sqlite/transaction|session-sqlite|state/agent-db)\] slow |.*\[trace:")
"""How long its own work took on a busy machine."""


class OpenClaw(msgspec.Struct, frozen=True):
    version: str
    api: Api
    name: str = "openclaw"

    def __str__(self) -> str:
        return f"{self.version}-{self.api}"

    def configure(self, site: Site) -> None:
        assert connect.main([self.name, "--url", site.url, "--api", self.api, "--write", str(site.home)]) == 0
        self.change_settings(
            site,
            {
                "agents": {"defaults": {"workspace": str(site.project)}},
                # There are no embeddings to search by, of which it would complain.
                "memory": {"search": {"enabled": False}},
            },
        )

    def change_settings(self, site: Site, changes: Mapping[str, object]) -> None:
        """Merge this into its settings."""
        file = self._settings(site)
        file.write_text(json.dumps(_merged(json.loads(file.read_text()), changes)))

    def change_model(self, site: Site, changes: Mapping[str, object]) -> None:
        """Change what it has been told of the model."""
        provider = json.loads(self._settings(site).read_text())["models"]["providers"][PROVIDER]
        models = [{**model, **changes} for model in provider["models"]]
        self.change_settings(site, {"models": {"providers": {PROVIDER: {"models": models}}}})

    def _settings(self, site: Site) -> Path:
        return site.home / ".openclaw" / "openclaw.json"

    def environment(self, site: Site) -> Mapping[str, str]:
        # Compiling its code takes longer than most runs.
        return {"NODE_COMPILE_CACHE": str(folder_of(self.name, self.version) / "compile-cache")}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        session = site.home / "session-id"
        if not resume:
            session.write_text(str(uuid.uuid4()))
        program = folder_of(self.name, self.version) / "node_modules" / "openclaw" / "openclaw.mjs"
        chosen = ["--agent", "main", "--session-id", session.read_text()]
        return ["node", str(program), "agent", "--local", *chosen, "--message", prompt]

    def answer(self, outcome: Outcome) -> str:
        return "\n".join(row for row in outcome.stdout.splitlines() if not row.startswith("["))

    def complaints(self, outcome: Outcome) -> list[str]:
        return [row for row in outcome.stderr.splitlines() if row.strip() and not _OF_THE_MACHINE.match(row)]

    def write(self, file: Path, content: str) -> Call:
        return Call("write", {"path": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("read", {"path": str(file)})

    def shell(self, command: str) -> Call:
        return Call("exec", {"command": command})


def _merged(old: object, new: object) -> object:
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


APIS: tuple[Api, ...] = ("chat", "responses", "messages")
ALL = tuple(OpenClaw(version, api) for version in versions_of("openclaw") for api in APIS)
