"""opencode: `opencode run` over each of the three APIs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbus_cli.connect import command as connect
from kvbus_cli.connect.configuration import Api
from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of


class OpenCode(msgspec.Struct, frozen=True):
    """``asks_for_title``: else each session has a title from its start, and no request is made for one."""

    version: str
    api: Api
    asks_for_title: bool = False
    name: str = "opencode"

    def __str__(self) -> str:
        return f"{self.version}-{self.api}"

    def configure(self, site: Site) -> None:
        assert connect.main([self.name, "--url", site.url, "--api", self.api, "--write", str(site.home)]) == 0
        # It installs types for plugins beside its settings, and waits for that, unless they seem to be there.
        folder = site.home / ".config" / "opencode"
        (folder / "node_modules").mkdir()
        installed = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": self.version}}}}
        (folder / "package-lock.json").write_text(json.dumps(installed))

    def environment(self, site: Site) -> Mapping[str, str]:
        return {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        program = folder_of(self.name, self.version) / "node_modules" / "opencode-ai" / "bin" / "opencode.exe"
        options = ["--continue"] if resume else [] if self.asks_for_title else ["--title", "Tides"]
        return [str(program), "run", "--auto", "--format", "json", *options, prompt]

    def answer(self, outcome: Outcome) -> str:
        return "\n".join(event["part"]["text"] for event in _events(outcome) if event["type"] == "text")

    def complaints(self, outcome: Outcome) -> list[str]:
        errors = [json.dumps(event) for event in _events(outcome) if event["type"] == "error"]
        return errors + [row for row in outcome.stderr.splitlines() if row.strip()]

    def write(self, file: Path, content: str) -> Call:
        return Call("write", {"filePath": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("read", {"filePath": str(file)})

    def shell(self, command: str) -> Call:
        return Call("bash", {"command": command, "description": "Runs it"})


def _events(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(row) for row in outcome.stdout.splitlines() if row.strip()]


APIS: tuple[Api, ...] = ("chat", "responses", "messages")
ALL = tuple(OpenCode(version, api) for version in versions_of("opencode") for api in APIS)
