"""Stopping a process for a while, as a debugger or an overloaded host does."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from kvbus_testkit.timing import eventually_sync


def pause(pid: int) -> None:
    """SIGSTOP. When this returns the process does nothing any more: the signal alone may take a while to reach all threads."""
    os.kill(pid, signal.SIGSTOP)
    eventually_sync(lambda: all(state in "Tt" for state in _states(pid)), what="a process that has stopped")


def resume(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """Of its threads, as proc(5) names them."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
