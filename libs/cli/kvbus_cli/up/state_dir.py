"""The folder of one running system. A lock keeps two systems out of one folder; it ends with the process that holds it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StateDirInUse(Exception):
    """Another `kvbus up` holds the folder."""


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Makes the folder and its ``logs``. Raise StateDirInUse."""
    (state_dir / "logs").mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise StateDirInUse(f"{state_dir} is in use by process {owner}; give another --state-dir") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
