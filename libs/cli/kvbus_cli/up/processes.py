"""Child processes: started, watched, ended in stages. Their output goes straight into their log files."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvbus_cli.up.plan import ProcessSpec

_TIED = Path(__file__).with_name("tied.py")


class Child:
    """A started process. ``ready_after_s`` is set by whoever finds it ready."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.process = process
        self.log = log
        self.started_at = time.monotonic()
        self.ready_after_s: float | None = None
        self.asked_to_end = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_status(self) -> int | None:
        return self.process.returncode

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        """To the process alone; nothing when it is gone."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def last_lines(self, count: int = 20) -> list[str]:
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return [line.rstrip("\n") for line in deque(file, maxlen=count)]
        except OSError:
            return []


def exit_text(status: int | None) -> str:
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


class ProcessSet:
    """All children of this command. ``on_end`` is called for each that ends, asked or not."""

    def __init__(self, log_dir: Path, on_end: Callable[[Child], None]) -> None:
        self.children: list[Child] = []
        self._log_dir = log_dir
        self._on_end = on_end
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, spec: ProcessSpec) -> Child:
        """In a process group of its own: the terminal's Ctrl-C reaches this command only, which then ends all in order."""
        log = self._log_dir / f"{spec.name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_TIED), str(os.getpid())),
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        child = Child(spec, process, log)
        self.children.append(child)
        self._watchers.append(asyncio.create_task(self._watch(child), name=f"watch-{spec.name}"))
        return child

    async def _watch(self, child: Child) -> None:
        await child.process.wait()
        self._on_end(child)

    def living(self, group: str | None = None) -> list[Child]:
        return [c for c in self.children if c.alive and group in (None, c.spec.group)]

    async def stop(self, stages: Sequence[str], grace_s: float) -> list[Child]:
        """SIGTERM stage by stage; who is not gone after ``grace_s`` is killed. Return the killed ones."""
        killed = []
        for group in stages:
            asked = self.living(group)
            for child in asked:
                child.asked_to_end = True
                child.signal(signal.SIGTERM)
            killed += await self._wait_or_kill(asked, grace_s)
        await asyncio.gather(*self._watchers)
        return killed

    async def _wait_or_kill(self, children: Sequence[Child], grace_s: float) -> list[Child]:
        if not children:
            return []
        waits = {asyncio.create_task(child.process.wait()): child for child in children}
        _, late = await asyncio.wait(waits, timeout=grace_s)
        for task in late:
            waits[task].signal(signal.SIGKILL)
        if late:
            await asyncio.wait(late)
        return [waits[task] for task in late]

    def kill_all(self) -> None:
        for child in self.living():
            child.asked_to_end = True
            child.signal(signal.SIGKILL)
