"""The state of a system in a file, for programs: `kvbus up --json-status FILE`."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbus_cli.up.processes import Child


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: starting, ready, ended. ``exit_status`` is negative for a signal. ``ready_after_s`` counts from its start."""

    name: str
    service: str
    pid: int
    state: str
    log: str
    ready_url: str = ""
    ready_after_s: float | None = None
    exit_status: int | None = None


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: starting, ready, stopping, stopped. ``url`` is the HTTP API's, ``models`` what it serves.

    ``exit_status`` is that of `kvbus up`.
    """

    state: str
    pid: int
    url: str
    nats_url: str
    namespace: str
    state_dir: str
    models: tuple[str, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    exit_status: int | None = None


def process_status(child: Child) -> ProcessStatus:
    state = "ended" if not child.alive else "starting" if child.ready_after_s is None else "ready"
    return ProcessStatus(
        name=child.spec.name,
        service=child.spec.group,
        pid=child.pid,
        state=state,
        log=str(child.log),
        ready_url=child.spec.ready_url,
        ready_after_s=child.ready_after_s,
        exit_status=child.exit_status,
    )


class StatusFile:
    """Replaced as a whole at every change, so a reader never sees half of it. The same in each path.

    Raise OSError.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    def write(self, status: SystemStatus, children: Sequence[Child]) -> None:
        full = msgspec.structs.replace(status, processes=tuple(process_status(child) for child in children))
        data = msgspec.json.format(msgspec.json.encode(full)) + b"\n"
        for path in self._paths:
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_bytes(data)
            temporary.replace(path)
