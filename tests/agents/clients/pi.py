"""pi: `pi -p` over each of the three APIs."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbus_cli.connect import command as connect
from kvbus_cli.connect.configuration import Api
from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of


class Pi(msgspec.Struct, frozen=True):
    version: str
    api: Api
    name: str = "pi"

    def __str__(self) -> str:
        return f"{self.version}-{self.api}"

    def configure(self, site: Site) -> None:
        assert connect.main([self.name, "--url", site.url, "--api", self.api, "--write", str(site.home)]) == 0
        # It keeps what is recent: here, where a token is a byte, less of it.
        file = site.home / ".pi" / "agent" / "settings.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "compaction": {"keepRecentTokens": 1000}}))
        # Its own prompt is so short that a tool's result is a good part of a request; with a project's it is not.
        (site.project / "AGENTS.md").write_text("Write down each tide with its hour and its height.\n" * 400)

    def environment(self, site: Site) -> Mapping[str, str]:
        return {"PI_OFFLINE": "1"}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        program = folder_of(self.name, self.version) / "node_modules" / ".bin" / "pi"
        return [str(program), *(["--continue"] if resume else []), "--thinking", "medium", "-p", prompt]

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        return [row for row in outcome.stderr.splitlines() if row.strip()]

    def write(self, file: Path, content: str) -> Call:
        return Call("write", {"path": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("read", {"path": str(file)})

    def shell(self, command: str) -> Call:
        return Call("bash", {"command": command})


APIS: tuple[Api, ...] = ("chat", "responses", "messages")
ALL = tuple(Pi(version, api) for version in versions_of("pi") for api in APIS)
