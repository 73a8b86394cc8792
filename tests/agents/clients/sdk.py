"""Agents written with the vendors' libraries: a loop of a few lines each, run as programs of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tests.agents.client import Outcome, Site
from tests.agents.model_formats import Call
from tests.agents.pins import folder_of, versions_of

Library = Literal["openai", "anthropic", "openai_agents"]
_ROOT = Path(__file__).parents[3]


class Sdk(msgspec.Struct, frozen=True):
    """``api``: which one the library is to speak, if it speaks several. ``streams``: whether it asks for streams.

    ``timeout_s``: the silence after which it gives a request up.
    """

    library: Library
    api: str
    streams: bool
    timeout_s: float = 60.0
    version: str = versions_of("sdk")[0]
    name: str = "sdk"

    def __str__(self) -> str:
        return f"{self.library}-{self.api}{'-streaming' if self.streams else ''}"

    def configure(self, site: Site) -> None: ...

    def environment(self, site: Site) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        python = str(folder_of(self.name, self.version) / "venv" / "bin" / "python")
        program = [python, "-m", f"tests.agents.clients.sdk_{self.library}"]
        options = ["--url", site.url, "--model", site.model, "--api", self.api, *(["--stream"] if self.streams else [])]
        options += ["--timeout", str(self.timeout_s)]
        session = ["--session", str(site.home / "session.json"), *(["--resume"] if resume else [])]
        return [*program, *options, *session, prompt]

    def answer(self, outcome: Outcome) -> str:
        return outcome.stdout.strip()

    def complaints(self, outcome: Outcome) -> list[str]:
        return [row for row in outcome.stderr.splitlines() if row.strip()]

    def write(self, file: Path, content: str) -> Call:
        return Call("write_file", {"path": str(file), "content": content})

    def read(self, file: Path) -> Call:
        return Call("read_file", {"path": str(file)})

    def shell(self, command: str) -> Call:
        return Call("run_command", {"command": command})


_SPOKEN: tuple[tuple[Library, str], ...] = (
    ("openai", "chat"),
    ("openai", "responses"),
    ("anthropic", "messages"),
    ("openai_agents", "chat"),
    ("openai_agents", "responses"),
)
ALL = tuple(Sdk(library, api, streams) for library, api in _SPOKEN for streams in (False, True))
STREAMING = tuple(client for client in ALL if client.streams)
