"""One running system: starts the processes of a plan, waits until they are ready, watches them, ends them in order."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import ProcessSpec, ends_everything, stop_stages
from kvbus_cli.up.processes import Child, ProcessSet
from kvbus_cli.up.readiness import model_names, probe
from kvbus_cli.up.status import StatusFile, SystemStatus

PROBE_INTERVAL_S = 0.1
"""Only while something is starting: a ready system is watched by waiting for its processes, which costs nothing."""


class Reporter(Protocol):
    """What the person at the terminal sees."""

    def started(self, child: Child) -> None: ...

    def waits(self, child: Child, reason: str) -> None:
        """Not ready yet; ``reason`` is what the service says, or ""."""

    def ready(self, child: Child) -> None: ...

    def died(self, child: Child, *, fatal: bool) -> None:
        """It ended unasked. Not ``fatal``: others of its kind go on."""

    def system_ready(self, status: SystemStatus, seconds: float) -> None: ...

    def stopping(self, reason: str) -> None: ...

    def failed(self, message: str) -> None: ...


class System:
    """``request_stop`` and ``force`` may be called from signal handlers of the loop."""

    def __init__(
        self,
        make_plan: Callable[[str], list[ProcessSpec]],
        *,
        url: str,
        nats_url: str,
        namespace: str,
        state_dir: Path,
        reporter: Reporter,
        status_file: StatusFile,
        ready_timeout_s: float,
        stop_grace_s: float,
        keep_going: bool = False,
    ) -> None:
        self.processes = ProcessSet(state_dir / "logs", self._on_end)
        self._make_plan = make_plan
        self._state_dir = state_dir
        self._reporter = reporter
        self._status_file = status_file
        self._ready_timeout_s = ready_timeout_s
        self._stop_grace_s = stop_grace_s
        self._keep_going = keep_going
        self._over = asyncio.Event()
        self._stop_reason = ""
        self._failed = False
        self._status_file_failed = False
        self._status = SystemStatus(
            state="starting", pid=os.getpid(), url=url, nats_url=nats_url, namespace=namespace, state_dir=str(state_dir)
        )

    def request_stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._over.set()

    def force(self) -> None:
        self._failed = True
        self.processes.kill_all()

    async def run(self) -> int:
        """Until a stop is requested (0) or the system cannot go on (1)."""
        try:
            await self._start()
            await self._over.wait()
        except (OSError, TimeoutError) as error:
            self._fail(str(error) or "the system did not start in time")
        finally:
            await self._stop()
        return self._status.exit_status or 0

    async def _start(self) -> None:
        begun = time.monotonic()
        if not self._status.nats_url:
            child, nats_url = await start_nats(self.processes, self._state_dir)
            self._status = msgspec.structs.replace(self._status, nats_url=nats_url)
            self._reporter.ready(child)
        for spec in self._make_plan(self._status.nats_url):
            if self._over.is_set():
                return
            self._reporter.started(await self.processes.start(spec))
            self._write("starting")
        await self._wait_until_ready(begun)
        if not self._over.is_set():
            models = await asyncio.to_thread(model_names, self._status.url)
            self._status = msgspec.structs.replace(self._status, models=models)
            self._reporter.system_ready(self._status, time.monotonic() - begun)
            self._write("ready")

    async def _wait_until_ready(self, begun: float) -> None:
        """All processes, and the HTTP API as its users see it."""
        while not self._over.is_set():
            waiting = [c for c in self.processes.living() if c.ready_after_s is None]
            for child in waiting:
                await self._probe(child)
            if not any(c.ready_after_s is None for c in waiting):
                answer = await asyncio.to_thread(probe, f"{self._status.url}/readyz")
                if answer.ready:
                    return
            if time.monotonic() - begun > self._ready_timeout_s:
                names = ", ".join(c.spec.name for c in waiting) or "the HTTP API"
                raise TimeoutError(f"not ready after {self._ready_timeout_s:.0f} s: {names}")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe(self, child: Child) -> None:
        answer = await asyncio.to_thread(probe, child.spec.ready_url)
        if answer.ready:
            child.ready_after_s = time.monotonic() - child.started_at
            self._reporter.ready(child)
            self._write(self._status.state)
        else:
            self._reporter.waits(child, answer.waits_for)

    def _on_end(self, child: Child) -> None:
        if not child.asked_to_end and not self._over.is_set():
            living = len(self.processes.living(child.spec.group))
            fatal = ends_everything(child.spec.group, living, keep_going=self._keep_going)
            self._reporter.died(child, fatal=fatal)
            if fatal:
                self._fail("")
        self._write(self._status.state)

    def _fail(self, message: str) -> None:
        self._failed = True
        if message:
            self._reporter.failed(message)
        self._over.set()

    async def _stop(self) -> None:
        self._write("stopping")
        self._reporter.stopping(self._stop_reason)
        groups = {child.spec.group for child in self.processes.living()}
        killed = await self.processes.stop(stop_stages(sorted(groups)), self._stop_grace_s)
        if killed and not self._failed:
            names = ", ".join(child.spec.name for child in killed)
            self._fail(f"did not end within {self._stop_grace_s:.0f} s and had to be killed: {names}")
        self._status = msgspec.structs.replace(self._status, exit_status=1 if self._failed else 0)
        self._write("stopped")

    def _write(self, state: str) -> None:
        self._status = msgspec.structs.replace(self._status, state=state)
        try:
            self._status_file.write(self._status, self.processes.children)
        except (
            OSError
        ) as error:  # a full disk, say: no reason to fall, and least of all while the processes are being ended
            if not self._status_file_failed:
                self._reporter.failed(f"the status file cannot be written: {error}")
            self._status_file_failed = True
