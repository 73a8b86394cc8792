"""Services as child processes of a test."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbus_testkit.timing import eventually_sync, scaled


class ServiceProcess:
    """``python -m <module> <arguments>`` with JSON logs. A context manager; leaving it terminates the process.

    The environment is this process's without its ``KVBUS_*`` variables, plus ``env``. ``wrap``: words before the command.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> None:
        base = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
        self.environment = {**base, "KVBUS_LOG_FORMAT": "json", "OMP_NUM_THREADS": "1", **(env or {})}
        self.command = [*wrap, sys.executable, "-m", module, *arguments]
        handle, name = tempfile.mkstemp(prefix="kvbus-process-", suffix=".log")
        self._log_file = Path(name)
        self._process = subprocess.Popen(
            self.command, stdout=handle, stderr=handle, stdin=subprocess.DEVNULL, env=self.environment
        )
        os.close(handle)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def log_text(self) -> str:
        return self._log_file.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The structured log lines so far."""
        found = []
        for line in self.log_text().splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def event(self, name: str) -> dict[str, Any] | None:
        """The last log line of this name."""
        return next((event for event in reversed(self.events()) if event.get("event") == name), None)

    def wait_for_event(self, name: str, *, timeout_s: float = 20.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = self.event(name)
            assert found or self.returncode is None, f"{self.command} ended with {self.returncode}: {self.log_text()}"
            return found

        found = eventually_sync(look, timeout_s=timeout_s, what=f"log event {name!r} of {self.command}")
        assert found is not None
        return found

    def wait_ready(self, *, timeout_s: float = 20.0) -> str:
        """Until ``/readyz`` answers 200; returns the URL of the health server."""
        url = str(self.wait_for_event("started", timeout_s=timeout_s)["health"])
        eventually_sync(lambda: http_status(url + "/readyz") == 200, timeout_s=timeout_s, what=f"{url}/readyz")
        return url

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, *, timeout_s: float = 20.0) -> int:
        """The exit status. Raise subprocess.TimeoutExpired."""
        return self._process.wait(timeout=scaled(timeout_s))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self.wait(timeout_s=10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log_file.unlink(missing_ok=True)

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def http_status(url: str) -> int:
    """Status of a GET, 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=scaled(5)) as response:  # noqa: S310
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)
    except (OSError, urllib.error.URLError):
        return 0
