"""The seam between scenarios and clients, and how a client is run: alone, with a home and a project of its own."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from kvbus_testkit.timing import scaled
from tests.agents.pins import node_bin

RUN_TIMEOUT_S = 240.0


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where a client runs. ``url``: of the server, without `/v1`. ``home``: nothing in it is the machine's own."""

    home: Path
    project: Path
    url: str
    model: str
    context_length: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left behind. ``status`` is negative when a signal ended it."""

    status: int
    stdout: str
    stderr: str


class Client(Protocol):
    """One version of one client. Everything that differs between clients is here; scenarios do not know."""

    @property
    def name(self) -> str:
        """As in pins.toml."""

    @property
    def version(self) -> str: ...

    def __str__(self) -> str:
        """Which of its kind: the version, and the API or transport if there are several."""

    def configure(self, site: Site) -> None:
        """Write the files that the client wants to find in its home."""

    def environment(self, site: Site) -> Mapping[str, str]:
        """Variables beside those that every client gets."""

    def command(self, site: Site, prompt: str, *, resume: bool) -> list[str]:
        """A headless run with one user turn: the first of a session, or the next one of the newest session."""

    def answer(self, outcome: Outcome) -> str:
        """The final answer as the client shows it."""

    def complaints(self, outcome: Outcome) -> list[str]:
        """Errors and warnings that it would not show against its vendor's API."""


class Running:
    """A client that runs; `wait` for it, or end it by a signal."""

    def __init__(self, command: Sequence[str], site: Site, environment: Mapping[str, str], log: Path) -> None:
        self._stdout, self._stderr = log.with_suffix(".stdout"), log.with_suffix(".stderr")
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=site.project,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Outcome:
        """Raise AssertionError with what it said when it takes too long."""
        try:
            self._process.wait(scaled(timeout_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the client did not end within {scaled(timeout_s):.0f} s: {self._said()}") from None
        self.kill()
        return self._said()

    def kill(self) -> None:
        """End it, with whatever it has started and left running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _said(self) -> Outcome:
        return Outcome(
            status=self._process.returncode,
            stdout=self._stdout.read_text(errors="replace"),
            stderr=self._stderr.read_text(errors="replace"),
        )


def base_environment(site: Site) -> dict[str, str]:
    """All that a client gets of the machine."""
    return {
        "HOME": str(site.home),
        "PATH": f"{node_bin()}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "SHELL": "/bin/sh",
        "USER": "user",
        "TMPDIR": str(site.home / "tmp"),
        "GIT_CONFIG_NOSYSTEM": "1",
    }


def make_project(folder: Path) -> Path:
    """A small git project of made-up files."""
    (folder / "src").mkdir(parents=True)
    (folder / "README.md").write_text("# Tidelog\n\nKeeps a log of the tides.\n")
    (folder / "src" / "tides.py").write_text("def next_tide(hour: float) -> float:\n    return hour + 12.42\n")
    author = ("-c", "user.name=Project", "-c", "user.email=project@example.org")
    for arguments in (("init", "--quiet", "--initial-branch=main"), ("add", "."), ("commit", "--quiet", "-m", "Begin")):
        subprocess.run(
            ["git", *author, *arguments], cwd=folder, check=True, env={"PATH": os.environ["PATH"], "HOME": "/"}
        )
    return folder
