"""Whole systems (`kvbus up`), started and used as a person does it."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvbus_testkit.timing import eventually_sync, scaled

KVBUS = [sys.executable, "-m", "kvbus_cli"]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_kvbus(*arguments: str, stdin: str = "", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVBUS, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=scaled(timeout_s),
        env=clean_environment(),
        check=False,
    )


class UpProcess(msgspec.Struct, frozen=True):
    """A process in the status file of `kvbus up`."""

    name: str
    service: str
    pid: int
    state: str
    log: str
    ready_url: str = ""
    exit_status: int | None = None


class UpStatus(msgspec.Struct, frozen=True):
    """The status file of `kvbus up`."""

    state: str
    pid: int
    url: str
    nats_url: str
    namespace: str
    models: tuple[str, ...] = ()
    processes: tuple[UpProcess, ...] = ()
    exit_status: int | None = None


class Sse:
    """The chunks of a streamed answer."""

    def __init__(self, body: str) -> None:
        data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
        self.done = bool(data) and data[-1] == "[DONE]"
        self.chunks: list[dict[str, Any]] = [json.loads(item) for item in data if item != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for chunk in self.chunks for choice in chunk["choices"])

    @property
    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = next(chunk["usage"] for chunk in self.chunks if chunk.get("usage"))
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class KvbusUp:
    """A running `kvbus up`; a context manager. Leaving it ends the system when a test has not."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.arena_dir = folder / "arena"
        self.arena_dir.mkdir()
        self._status_file = folder / "status.json"
        self._output = folder / "output.txt"
        self.port = _free_port()
        command = [
            *KVBUS,
            "up",
            *(
                "--http-port",
                str(self.port),
                "--state-dir",
                str(folder / "state"),
                "--json-status",
                str(self._status_file),
            ),
            *("--set", f"kvbm.arena_dir={self.arena_dir}", "--set", f"kvbm.g2_bytes={64 << 20}"),
            *arguments,
        ]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=clean_environment()
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def status(self) -> UpStatus:
        return msgspec.json.decode(self._status_file.read_bytes(), type=UpStatus)

    @property
    def url(self) -> str:
        return self.status.url

    @property
    def model(self) -> str:
        return self.status.models[0]

    def wait_ready(self, timeout_s: float) -> "KvbusUp":
        def ready() -> bool:
            assert self.process.poll() is None, f"kvbus up ended with {self.process.returncode}:\n{self.output}"
            return self._status_file.exists() and self.status.state == "ready"

        eventually_sync(ready, timeout_s=timeout_s, what="kvbus up being ready")
        return self

    def processes(self, service: str) -> list[UpProcess]:
        return [process for process in self.status.processes if process.service == service]

    def pids(self) -> list[int]:
        return [process.pid for process in self.status.processes]

    def wait(self, timeout_s: float = 40.0) -> int:
        return self.process.wait(scaled(timeout_s))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def curl_line(self) -> list[str]:
        """The words of the curl line that it printed."""
        line = next(line for line in self.output.splitlines() if line.strip().startswith("curl "))
        return shlex.split(line)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> str:
        request = urllib.request.Request(  # noqa: S310
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=scaled(timeout_s)) as response:  # noqa: S310
            text: str = response.read().decode()
            return text

    def chat(self, messages: Sequence[dict[str, str]], **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": list(messages), **fields}
        answer: dict[str, Any] = json.loads(self.post("/v1/chat/completions", body))
        return answer

    def stream(self, messages: Sequence[dict[str, str]], **fields: Any) -> Sse:
        body = {"model": self.model, "messages": list(messages), "stream": True, **fields}
        return Sse(self.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))

    def __enter__(self) -> "KvbusUp":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run_curl_line(words: Sequence[str]) -> str:
    """What curl would get: the machine need not have it."""
    assert words[0] == "curl"
    body = words[words.index("-d") + 1].encode()
    url = next(word for word in words if word.startswith("http"))
    name, _, value = words[words.index("-H") + 1].partition(": ")
    request = urllib.request.Request(url, body, {name: value})  # noqa: S310
    with urllib.request.urlopen(request, timeout=scaled(120)) as response:  # noqa: S310
        text: str = response.read().decode()
        return text
