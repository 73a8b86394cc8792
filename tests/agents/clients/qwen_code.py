"""Qwen Code: `qwen -p` over the Chat API."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbus_cli.connect import command as connect
from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of

_BROKEN_STREAM = "Retrying provider attempt"
"""Said of each stream that breaks off, whoever's it is."""


class QwenCode(msgspec.Struct, frozen=True):
    version: str
    name: str = "qwen-code"

    def __str__(self) -> str:
        return self.version

    def configure(self, site: Site) -> None:
        assert connect.main(["qwen", "--url", site.url, "--write", str(site.home)]) == 0
        file = site.home / ".qwen" / "settings.json"
        settings = json.loads(file.read_text())
        settings["tools"] = {"useRipgrep": False}
        settings["privacy"] = {"usageStatisticsEnabled": False}
        settings["general"] = {"disableAutoUpdate": True}
        file.write_text(json.dumps(settings))

    def environment(self, site: Site) -> Mapping[str, str]:
        return {"QWEN_TELEMETRY_ENABLED": "0", "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        program = folder_of(self.name, self.version) / "node_modules" / ".bin" / "qwen"
        return [str(program), *(["--continue"] if resume else []), "--yolo", "-p", prompt]

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        rows = [row for row in outcome.stderr.splitlines() if row.strip()]
        return [row for row in rows if not row.startswith(_BROKEN_STREAM)]

    def write(self, file: Path, content: str) -> Call:
        return Call("write_file", {"file_path": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("read_file", {"file_path": str(file)})

    def shell(self, command: str) -> Call:
        # What it has not read soon after a command's end is lost to it, as happens where the machine is busy.
        command += " && sleep 0.3"
        return Call("run_shell_command", {"command": command, "is_background": False, "description": "Run it"})


ALL = tuple(QwenCode(version) for version in versions_of("qwen-code"))
