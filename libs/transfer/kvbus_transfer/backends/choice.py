"""Backends by name. Libraries are imported when a backend starts, and a missing one is a message, never an import error."""

from typing import Protocol

from kvbus_transfer.arena import Arena
from kvbus_transfer.backends import nixl, ucx
from kvbus_transfer.backends.base import Backend, BackendUnavailable
from kvbus_transfer.backends.nixl import NixlBackend
from kvbus_transfer.backends.shm import ShmBackend
from kvbus_transfer.backends.tcp import TcpBackend
from kvbus_transfer.backends.ucx import UcxBackend
from kvbus_transfer.hosts import shm_folder
from kvbus_transfer.limits import TransferLimits

BACKENDS = ("shm", "nixl", "ucx", "tcp")


class Needs(Protocol):
    @property
    def agent_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def lease_table(self) -> Arena | None: ...
    @property
    def table(self) -> memoryview: ...
    @property
    def limits(self) -> TransferLimits: ...


def missing_here() -> dict[str, str]:
    """For each backend why this process cannot use it, empty when it can. Loads the libraries: it takes a second."""
    found = dict.fromkeys(BACKENDS, "")
    if shm_folder() is None:
        found["shm"] = "there is no /dev/shm"
    for name, load in (("nixl", nixl.load), ("ucx", ucx.load)):
        try:
            load()
        except BackendUnavailable as missing:
            found[name] = missing.detail
    return found


def make_backend(name: str, agent: Needs) -> Backend:
    """Raise BackendUnavailable, and ValueError for a name that is none."""
    match name:
        case "tcp":
            return TcpBackend()
        case "shm":
            if agent.lease_table is None:
                raise BackendUnavailable("there is no /dev/shm")
            return ShmBackend(agent.lease_table, agent.limits)
        case "nixl":
            return NixlBackend(f"{agent.agent_id}/{agent.incarnation}", agent.table, agent.limits)
        case "ucx":
            return UcxBackend(agent.table, agent.limits)
        case _:
            raise ValueError(f"{name!r} is no backend; there are {', '.join(BACKENDS)}")
