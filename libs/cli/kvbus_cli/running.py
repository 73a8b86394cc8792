"""The systems that `kvbus up` runs on this machine, as far as their state folders tell."""

import os
from pathlib import Path

import msgspec

from kvbus_cli.paths import state_root
from kvbus_runtime.settings import CommonSettings

STATUS_FILE = "status.json"
"""In the state folder of each system: see `kvbus_cli.up.status`."""


class RunningSystem(msgspec.Struct, frozen=True):
    """``pid``: of `kvbus up`."""

    state: str
    pid: int
    nats_url: str
    namespace: str


def running_systems(root: Path | None = None) -> list[RunningSystem]:
    """Those with a folder in the usual place, by its name; files that cannot be read are passed over."""
    found = []
    for file in sorted((root or state_root()).glob(f"up-*/{STATUS_FILE}")):
        try:
            system = msgspec.json.decode(file.read_bytes(), type=RunningSystem)
        except (OSError, msgspec.DecodeError):
            continue
        if system.nats_url and system.state in ("starting", "ready") and _is_alive(system.pid):
            found.append(system)
    return found


def bus_hint(settings: CommonSettings, root: Path | None = None) -> str:
    """What to do when there is no bus at the default address; "" when another was given."""
    if settings.nats != type(settings)().nats:
        return ""
    systems = running_systems(root)
    if not systems:
        return "; that is the default: give --nats URL (`kvbus up` prints its own)"
    options = [f"--nats {system.nats_url} --namespace {system.namespace}" for system in systems]
    return f"; that is the default, but `kvbus up` runs here: give {' or '.join(options)}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return pid > 0
    return True
