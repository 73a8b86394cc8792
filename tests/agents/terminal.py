"""A client in a terminal, for what it only does there: keys go in, the screen's text comes out."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from kvbus_testkit.timing import scaled
from tests.agents.client import Site

_CONTROL = re.compile(
    r"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[@-Z\\-_()][0-9A-B]?)"
)
_READ_BYTES = 65_536


class Terminal:
    """A context manager; leaving it ends the client."""

    def __init__(self, command: Sequence[str], site: Site, environment: Mapping[str, str]) -> None:
        self._written = b""
        self._screen, terminal = pty.openpty()
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            cwd=site.project,
            env={**environment, "TERM": "xterm-256color"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)

    @property
    def text(self) -> str:
        """All that was written so far, without control sequences and white space: a screen is drawn in pieces."""
        return re.sub(r"\s+", "", _CONTROL.sub("", self._written.decode(errors="replace")))

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until ``text``, white space aside, has been written. Raise AssertionError with what has been."""
        wanted = re.sub(r"\s+", "", text)
        deadline = time.monotonic() + scaled(timeout_s)
        while wanted not in self.text:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.text[-3000:]}"
            self._read(0.1)

    def _read(self, wait_s: float) -> None:
        ready, _, _ = select.select([self._screen], [], [], wait_s)
        if ready:
            with suppress(OSError):  # the client has ended
                self._written += os.read(self._screen, _READ_BYTES)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._screen)
