"""Installing the pinned clients: the only part of the agent tests that needs a network."""

import os
import subprocess
import sys
from collections.abc import Iterable

from tests.agents.pins import Pin, folder_of, is_installed, marker_of, node_bin, pins

_TIMEOUT_S = 900


def install(clients: Iterable[str]) -> list[str]:
    """Install what is missing of these clients, Node first. Return what could not be installed, and why, a line each."""
    known = pins()
    failures = []
    for client in ("node", *(client for client in clients if client in known)):
        for version in known[client].versions:
            if is_installed(client, version):
                continue
            print(f"installing {client} {version}", flush=True)
            try:
                _install(client, version, known[client])
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or ""
                failures.append(f"{client} {version}: {error} {said[-500:]}".strip())
    return failures


def _install(client: str, version: str, pin: Pin) -> None:
    folder = folder_of(client, version)
    folder.mkdir(parents=True, exist_ok=True)
    if pin.npm:
        path = f"{node_bin()}{os.pathsep}{os.environ['PATH']}"
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{pin.npm}@{version}"], path)
    else:
        _run([sys.executable, "-m", "venv", str(folder / "venv")], os.environ["PATH"])
        first, *more = pin.pypi
        packages = [f"{first}=={version}", *more]
        _run([str(folder / "venv" / "bin" / "pip"), "install", "--quiet", *packages], os.environ["PATH"])
    marker_of(client, version).touch()


def _run(command: list[str], path: str) -> None:
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
