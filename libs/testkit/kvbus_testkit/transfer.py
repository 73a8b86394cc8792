"""Controls a transfer agent of another process (`kvbus_testkit.transfer_peer`) from a test."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbus_transfer import AgentInfo


class PeerError(Exception):
    """What the command raised over there. ``code``: of the TransferError."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class TransferPeer:
    """A context manager; leaving it ends the process. ``prefix``: of the command, such as ``ip netns exec``."""

    def __init__(
        self, options: Mapping[str, Any], *, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        base = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvbus_testkit.transfer_peer", json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**base, **(env or {})},
        )
        self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raise PeerError."""
        if self.process.stdin is None:
            raise RuntimeError("no pipe")
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def grant(
        self, region: int, segments: Sequence[tuple[int, int]], lease_s: float = 60.0, **options: Any
    ) -> tuple[bytes, int]:
        """The sealed grant and its lease."""
        told = self.ask("grant", region=region, segments=list(segments), lease_s=lease_s, **options)
        return base64.b64decode(told["sealed"]), told["lease"]

    def register(self, kind: str, size_bytes: int, seed: int, layout: str = "") -> int:
        region: int = self.ask("register", kind=kind, size_bytes=size_bytes, seed=seed, layout=layout)["region"]
        return region

    def bytes(self, region: int, offset: int, length: int) -> bytes:
        return base64.b64decode(self.ask("bytes", region=region, offset=offset, length=length)["data"])

    def info(self) -> AgentInfo:
        return AgentInfo.decode(base64.b64decode(self.ask("info")["info"]))

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait()
        for arena in Path("/dev/shm").glob(f"kvbus-test-{self.process.pid}-*.arena"):  # noqa: S108
            arena.unlink()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> "TransferPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout is not None else b""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the peer has ended: {self._log.read().decode(errors='replace')[-4000:]}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise PeerError(told["error"], told["detail"])
        return told


@contextmanager
def other_host(name: str) -> Iterator[tuple[str, str] | None]:
    """A network namespace joined to this one by a veth pair: (address here, address there); None where that is not allowed.

    Enter it with ``ip netns exec <name>``. ``name``: at most 8 characters, of this test process alone.
    """
    number = os.getpid() % 250
    here, there = f"10.211.{number}.1", f"10.211.{number}.2"
    inside = ["ip", "netns", "exec", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}p", "netns", name],
        ["ip", "addr", "add", f"{here}/30", "dev", f"{name}h"],
        ["ip", "link", "set", f"{name}h", "up"],
        [*inside, "ip", "addr", "add", f"{there}/30", "dev", f"{name}p"],
        [*inside, "ip", "link", "set", f"{name}p", "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
    ]
    made = False
    try:
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, check=False)
            except FileNotFoundError:
                yield None
                return
            if done.returncode != 0:
                yield None
                return
            made = True
        yield here, there
    finally:
        if made:
            subprocess.run(["ip", "link", "del", f"{name}h"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
