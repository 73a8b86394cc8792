"""Which processes can share memory."""

from functools import cache
from pathlib import Path

_SHM = Path("/dev/shm")  # noqa: S108
_RDMA = Path("/sys/class/infiniband")


def shm_folder() -> Path | None:
    """None where there is no memory file system."""
    return _SHM if _SHM.is_dir() else None


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return "unknown"


@cache
def has_rdma() -> bool:
    """Whether this host has a network that reads remote memory by itself."""
    try:
        return any(_RDMA.iterdir())
    except OSError:
        return False


@cache
def container_identity() -> str:
    """The same for processes that share host, processes and network: they can copy from each other's memory."""
    return f"{host_identity()}/{_namespace('pid')}/{_namespace('net')}"


@cache
def host_identity() -> str:
    """The same for processes of one boot of one machine that see the same shared memory; containers with their own do not. It reads
    files the first time: call it in a thread before a loop does."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    folder = shm_folder()
    return f"{boot}/{folder.stat().st_dev if folder else '-'}"
