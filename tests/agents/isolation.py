"""A network namespace with nothing but loopback, so that no client can reach anything but the server under test."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

REASON = "KVBUS_AGENTS_NO_NAMESPACE"
"""Environment variable: why there is no namespace."""

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def entry_command() -> tuple[list[str], str]:
    """What to put before a command to run it without network, and why that is impossible here (empty when it is possible)."""
    if shutil.which("unshare") is None:
        return [], "there is no `unshare` command on this machine"
    said = ""
    for command in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False, timeout=30)
        if tried.returncode == 0:
            return command, ""
        said = tried.stderr.strip()
    return [], f"network namespaces are not allowed here ({said})"


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP, b""))


def missing() -> str:
    """Why this process is not isolated; empty when it is: no route leads anywhere."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    if routes:
        return os.environ.get(REASON) or "not in a network namespace of its own; use `make agents`"
    return ""
