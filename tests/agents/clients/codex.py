"""Codex: `codex exec` over the Responses API, by HTTP or by WebSocket, set up by `kvbus connect codex`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbus_cli.connect import command as connect
from tests.agents.client import Outcome, Site
from tests.agents.exchange import Exchange
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of

PROVIDER = "model_providers.kvbus"
"""Where the server's settings are in Codex's configuration; `-c` overrides them for a run."""

RUN_FREELY = "--dangerously-bypass-approvals-and-sandbox"

_COMPLAINT = re.compile(r"\b(warning|error|reconnecting|failed|unsupported|deprecated)\b", re.IGNORECASE)
_SAID_ANYWHERE = ("could not find system bubblewrap", "Heads up: Long threads and multiple compactions")


class Codex(msgspec.Struct, frozen=True):
    version: str
    websocket: bool = False
    name: str = "codex"

    def __str__(self) -> str:
        return f"{self.version}-{'websocket' if self.websocket else 'http'}"

    @property
    def binary(self) -> str:
        return str(folder_of(self.name, self.version) / "node_modules" / ".bin" / "codex")

    def configure(self, site: Site) -> None:
        written = connect.main([self.name, "--url", site.url, "--write", str(site.home)])
        assert written == 0
        trust = f'\n[projects."{site.project}"]\ntrust_level = "trusted"\n'
        config = site.home / ".codex" / "config.toml"
        config.write_text(config.read_text() + trust)

    def change_catalog(self, site: Site, facts: Mapping[str, Any]) -> None:
        """Facts of the model beside those that `kvbus connect` tells; with some of them Codex offers more tools."""
        file = site.home / ".codex" / "kvbus-models.json"
        catalog = json.loads(file.read_text())
        for entry in catalog["models"]:
            entry.update(facts)
        file.write_text(json.dumps(catalog))

    def environment(self, site: Site) -> Mapping[str, str]:
        return {"CODEX_HOME": str(site.home / ".codex")}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        asked = ["resume", "--last", prompt] if resume else [prompt]
        return [self.binary, "exec", *self._settings, RUN_FREELY, *asked]

    def terminal_command(self) -> list[str]:
        return [self.binary, *self._settings, RUN_FREELY]

    @property
    def _settings(self) -> list[str]:
        return ["-c", f"{PROVIDER}.supports_websockets=true"] if self.websocket else []

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        rows = [row for row in outcome.stderr.splitlines() if _COMPLAINT.search(row)]
        return [row for row in rows if not any(said in row for said in _SAID_ANYWHERE)]


_NEWEST = versions_of("codex")[0]
ALL = (*(Codex(version) for version in versions_of("codex")), Codex(_NEWEST, websocket=True))
NEWEST = tuple(client for client in ALL if client.version == _NEWEST)


def shell(command: str) -> Call:
    return Call("exec_command", {"cmd": command})


def shell_until(file: str, said: str) -> Call:
    """A command that waits for a file of the project, then says something."""
    command = f"until [ -e {file} ]; do sleep 0.05; done; echo {said}"
    return Call("exec_command", {"cmd": command, "yield_time_ms": 30_000})


def turns(made: Sequence[Exchange]) -> list[Exchange]:
    """Of generations, those of the session itself: not what warms a WebSocket up, nor those of sub-agents."""
    return [e for e in made if e.json.get("generate") is not False and "x-openai-subagent" not in e.headers]


def items(exchange: Exchange, kind: str) -> list[dict[str, Any]]:
    """Items of this type in a request."""
    return [item for item in exchange.json["input"] if item["type"] == kind]
