"""aider: one message over chat, without tools; it edits files by what the model writes, and commits them."""

import re
from collections.abc import Mapping

import msgspec

from kvbus_cli.connect import command as connect
from kvbus_cli.connect.aider import ENV_FILE
from tests.agents.client import Outcome, Site
from tests.agents.pins import folder_of, versions_of


class Aider(msgspec.Struct, frozen=True):
    version: str
    name: str = "aider"

    def __str__(self) -> str:
        return self.version

    def configure(self, site: Site) -> None:
        assert connect.main([self.name, "--url", site.url, "--write", str(site.home)]) == 0
        (site.home / ".gitconfig").write_text("[user]\n\tname = Project\n\temail = project@example.org\n")

    def environment(self, site: Site) -> Mapping[str, str]:
        return {}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        program = folder_of(self.name, self.version) / "venv" / "bin" / "aider"
        settings = ["--env-file", str(site.home / ENV_FILE), "--yes-always", "--no-pretty", "--no-gitignore"]
        without_network = ["--no-check-update", "--no-show-release-notes", "--no-analytics", "--no-detect-urls"]
        history = ["--restore-chat-history"] if resume else []
        return [str(program), *settings, *without_network, *history, "--message", prompt, "src/tides.py"]

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        said = [row for row in outcome.stdout.splitlines() if re.search("error|warning", row, re.IGNORECASE)]
        return [*outcome.stderr.splitlines(), *said]


ALL = tuple(Aider(version) for version in versions_of("aider"))
