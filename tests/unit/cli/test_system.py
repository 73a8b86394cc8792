"""One running system: readiness, deaths, order of ending. The services are small HTTP servers."""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import Child
from kvbus_cli.up.status import StatusFile, SystemStatus
from kvbus_cli.up.system import System
from kvbus_testkit.timing import eventually, scaled

SERVICE = """
import http.server, json, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = pathlib.Path(sys.argv[2]).exists()
        body = {"ready": ready, "checks": {"engine": {"ok": ready, "detail": "loading"}}}
        if self.path == "/v1/models":
            body = {"object": "list", "data": [{"id": "m"}]}
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *args):
        print("asked", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Notes:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, child: Child) -> None:
        self.lines.append(f"started {child.spec.name}")

    def waits(self, child: Child, reason: str) -> None:
        if reason:
            self.lines.append(f"{child.spec.name} waits for {reason}")

    def ready(self, child: Child) -> None:
        self.lines.append(f"ready {child.spec.name}")

    def died(self, child: Child, *, fatal: bool) -> None:
        self.lines.append(f"died {child.spec.name} {'fatal' if fatal else 'tolerated'}")

    def system_ready(self, status: SystemStatus, seconds: float) -> None:
        self.lines.append(f"system ready {status.models}")

    def stopping(self, reason: str) -> None:
        self.lines.append(f"stopping {reason}")

    def failed(self, message: str) -> None:
        self.lines.append(f"failed {message}")


class Run:
    def __init__(self, folder: Path, *, ready_timeout_s: float, keep_going: bool = False) -> None:
        pick = free_port_picker(random.Random())
        ports = {name: pick() for name in ("worker-0", "worker-1", "router", "frontend")}
        self.ready_file = folder / "ready"
        self.notes = Notes()
        self.status_file = folder / "status.json"
        (folder / "logs").mkdir()

        def spec(name: str) -> ProcessSpec:
            command = (sys.executable, "-c", SERVICE, str(ports[name]), str(self.ready_file))
            url = f"http://127.0.0.1:{ports[name]}/readyz"
            return ProcessSpec(name=name, group=name.partition("-")[0], command=command, ready_url=url)

        self.system = System(
            lambda nats_url: [spec(name) for name in ports],
            url=f"http://127.0.0.1:{ports['frontend']}",
            nats_url="nats://elsewhere:4222",
            namespace="n",
            state_dir=folder,
            reporter=self.notes,
            status_file=StatusFile(self.status_file),
            ready_timeout_s=ready_timeout_s,
            stop_grace_s=scaled(10),
            keep_going=keep_going,
        )

    def kill(self, name: str) -> None:
        child = next(c for c in self.system.processes.children if c.spec.name == name)
        os.kill(child.pid, signal.SIGKILL)

    async def until(self, line: str) -> None:
        await eventually(lambda: line in self.notes.lines, what=line)


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[int]]:
    task = asyncio.create_task(run.system.run())
    try:
        yield task
    finally:
        run.system.request_stop("the test ends")
        await task


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, ready_timeout_s=scaled(30))
    run.ready_file.touch()
    return run


READY = "system ready ('m',)"


async def test_the_system_is_ready_when_all_services_are(run: Run) -> None:
    run.ready_file.unlink()
    async with running(run) as task:
        await run.until("worker-1 waits for engine: loading")
        assert READY not in run.notes.lines
        run.ready_file.touch()
        await run.until(READY)
        status = json.loads(run.status_file.read_text())
        assert status["state"] == "ready"
        assert {process["state"] for process in status["processes"]} == {"ready"}
        run.system.request_stop("SIGINT")
        assert await task == 0
    assert json.loads(run.status_file.read_text())["state"] == "stopped"


async def test_a_dead_worker_is_tolerated_while_another_lives_and_the_last_one_is_fatal(run: Run) -> None:
    async with running(run) as task:
        await run.until(READY)
        run.kill("worker-0")
        await run.until("died worker-0 tolerated")
        assert not task.done()
        run.kill("worker-1")
        assert await task == 1
        assert "died worker-1 fatal" in run.notes.lines


async def test_a_dead_router_ends_the_system(run: Run) -> None:
    async with running(run) as task:
        await run.until(READY)
        run.kill("router")
        assert await task == 1
    assert not run.system.processes.living()


async def test_with_keep_going_a_dead_router_is_tolerated(tmp_path: Path) -> None:
    run = Run(tmp_path, ready_timeout_s=scaled(30), keep_going=True)
    run.ready_file.touch()
    async with running(run) as task:
        await run.until(READY)
        run.kill("router")
        await run.until("died router tolerated")
        assert not task.done()


async def test_a_system_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, ready_timeout_s=0.3)
    assert await run.system.run() == 1
    assert any(line.startswith("failed not ready after") for line in run.notes.lines)
    assert not run.system.processes.living()


async def test_force_kills_what_is_left_and_the_status_says_so(run: Run) -> None:
    async with running(run) as task:
        await run.until(READY)
        run.system.force()
        run.system.request_stop("SIGINT")
        assert await task == 1


async def test_a_status_file_that_cannot_be_written_is_told_once_and_harms_nothing(run: Run) -> None:
    async with running(run) as task:
        await run.until(READY)
        run.status_file.unlink()
        run.status_file.mkdir()
        run.system.request_stop("SIGINT")
        assert await task == 0
    assert not run.system.processes.living()
    assert len([line for line in run.notes.lines if "status file" in line]) == 1
