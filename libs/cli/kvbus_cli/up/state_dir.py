"""The folder of one running system. A lock keeps two systems out of one folder; it ends with the process that holds it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StateDirInUse(Exception):
    """Another `kvbus up` holds the folder."""


class StateDirUnusable(Exception):
    """The folder cannot be made or written."""


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Makes the folder and its ``logs``. Raise StateDirInUse or StateDirUnusable."""
    try:
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)
        file = (state_dir / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise StateDirUnusable(f"{state_dir} cannot be used: {error.strerror}; give another --state-dir") from error
    with file as lock:
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
