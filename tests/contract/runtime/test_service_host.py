"""The life of a hosted service: start, readiness, crash, orderly end, forced end; and what `$SRV` says about it."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from kvbus_runtime.errors import Superseded
from kvbus_runtime.service import App, Service, host
from kvbus_runtime.serving import RequestContext
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess, http_status
from kvbus_testkit.services import IdleApp, running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.message import Message
from kvbus_wire.worker import Cancel, Done

WAIT_S = scaled(10)

PROGRAM = """
import asyncio, os, sys
from kvbus_runtime.service import run_service
from kvbus_runtime.settings import CommonSettings, parse_settings

class App:
    def __init__(self, service):
        self.service = service

    async def drain(self, reason):
        self.service.log.info("app_drains", reason=reason)
        try:
            await asyncio.sleep(float(os.environ.get("DRAIN_S", "0")))
        except asyncio.CancelledError:
            self.service.log.info("app_drain_cancelled")
            raise

    async def close(self):
        self.service.log.info("app_closes")

async def crash():
    raise LookupError("the cause")

def hang():
    import time
    while True:
        time.sleep(60)

async def start(service, settings):
    await service.register()
    if "CRASH" in os.environ:
        service.spawn(crash(), name="crash")
    if "HANG" in os.environ:
        asyncio.get_running_loop().run_in_executor(None, hang)
    return App(service)

settings = parse_settings(CommonSettings, service="worker", description="d", argv=sys.argv[1:])
raise SystemExit(run_service("worker", settings, start))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "runtime_test_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "runtime_test_program"


def names(process: ServiceProcess) -> list[str]:
    return [str(event["event"]) for event in process.events()]


def test_sigterm_ends_in_the_documented_order_with_status_0(
    program: str, nats_server: NatsServer, namespace: str
) -> None:
    with ServiceProcess(program, ["--nats", nats_server.url, "--namespace", namespace]) as process:
        url = process.wait_ready()
        assert http_status(url + "/livez") == 200
        process.terminate()
        assert process.wait() == 0
        order = [
            n for n in names(process) if n in ("settings", "started", "draining", "app_drains", "app_closes", "stopped")
        ]
        assert order == ["settings", "started", "draining", "app_drains", "app_closes", "stopped"]
        drains = process.event("app_drains")
        assert drains is not None
        assert drains["reason"] == "SIGTERM"
        settings = process.event("settings")
        assert settings is not None
        assert settings["namespace"] == namespace
        assert settings["service"] == "worker"


def test_while_draining_it_is_alive_but_not_ready(program: str, nats_server: NatsServer, namespace: str) -> None:
    env = {"DRAIN_S": "600"}
    arguments = ["--nats", nats_server.url, "--namespace", namespace, "--drain-timeout-s", "600"]
    with ServiceProcess(program, arguments, env=env) as process:
        url = process.wait_ready()
        process.terminate()
        process.wait_for_event("app_drains")
        assert http_status(url + "/readyz") == 503
        assert http_status(url + "/livez") == 200
        process.send(signal.SIGTERM)
        assert process.wait() == 3
        assert "forced" in names(process)


def test_the_drain_deadline_cancels_what_is_in_flight(program: str, nats_server: NatsServer, namespace: str) -> None:
    arguments = ["--nats", nats_server.url, "--namespace", namespace, "--drain-timeout-s", "0.2"]
    with ServiceProcess(program, arguments, env={"DRAIN_S": "600"}) as process:
        process.wait_ready()
        process.send(signal.SIGINT)
        assert process.wait() == 0
        order = [n for n in names(process) if n in ("drain_deadline", "app_drain_cancelled", "app_closes")]
        assert order == ["drain_deadline", "app_drain_cancelled", "app_closes"]


def test_a_second_signal_ends_even_a_process_whose_threads_hang(
    program: str, nats_server: NatsServer, namespace: str
) -> None:
    arguments = ["--nats", nats_server.url, "--namespace", namespace]
    with ServiceProcess(program, arguments, env={"HANG": "1", "DRAIN_S": "600"}) as process:
        process.wait_ready()
        process.terminate()
        process.wait_for_event("app_drains")
        process.terminate()
        assert process.wait() == 3


def test_a_crashed_task_ends_the_process_with_its_cause(program: str, nats_server: NatsServer, namespace: str) -> None:
    arguments = ["--nats", nats_server.url, "--namespace", namespace]
    with ServiceProcess(program, arguments, env={"CRASH": "1"}) as process:
        assert process.wait() == 1
        crashed = process.event("crashed")
        assert crashed is not None
        assert "LookupError: the cause" in crashed["exception"]


def test_an_id_that_is_taken_is_one_line_that_says_so(program: str, nats_server: NatsServer, namespace: str) -> None:
    arguments = ["--nats", nats_server.url, "--namespace", namespace, "--instance-id", "same", "--lease-ttl-s", "2"]
    with ServiceProcess(program, arguments) as older:
        older.wait_ready()
        with ServiceProcess(program, arguments):
            assert older.wait() == 1
        superseded, stopped = older.event("superseded"), older.event("stopped")
        assert superseded is not None
        assert "--instance-id" in superseded["hint"]
        assert stopped is not None
        assert stopped["reason"] == "Superseded"
        assert "Traceback" not in older.log_text()


def test_bad_configuration_is_told_before_any_connection(program: str) -> None:
    with ServiceProcess(program, ["--lease-ttl-s", "0"]) as process:
        assert process.wait() == 2
        assert "lease_ttl_s" in process.log_text()
    with ServiceProcess(program, ["--nats-nkey-seed", "/nowhere"]) as process:
        assert process.wait() == 2
        assert "/nowhere" in process.log_text()


def test_it_waits_for_a_bus_that_is_not_there_and_can_be_stopped_meanwhile(program: str) -> None:
    with ServiceProcess(program, ["--nats", "nats://127.0.0.1:1", "--health-port", "0"]) as process:
        process.wait_for_event("bus_unreachable")
        assert process.returncode is None
        process.terminate()
        assert process.wait() == 0


def test_a_taken_health_port_is_a_crash_with_a_clear_cause(program: str, nats_server: NatsServer) -> None:
    port = nats_server.url.rpartition(":")[2]
    with ServiceProcess(program, ["--nats", nats_server.url, "--health-port", port]) as process:
        assert process.wait() == 1
        assert "address already in use" in process.log_text()


def test_a_service_is_small(program: str, nats_server: NatsServer, namespace: str) -> None:
    with ServiceProcess(program, ["--nats", nats_server.url, "--namespace", namespace]) as process:
        process.wait_ready()
        assert psutil.Process(process.pid).memory_info().rss < 150 << 20


async def test_a_hosted_service_that_crashes_raises_its_cause(nats_server: NatsServer, namespace: str) -> None:
    async def crash() -> None:
        raise LookupError("the cause")

    async def start(service: Service, settings: CommonSettings) -> App:
        service.spawn(crash(), name="crash")
        return IdleApp()

    async def run() -> None:
        async with running_service(nats_server.url, namespace, start=start) as service:
            async with asyncio.timeout(WAIT_S):
                while not service._tasks.closed:
                    await asyncio.sleep(0.01)

    with pytest.raises(LookupError, match="the cause"):
        await run()


async def test_a_failing_start_raises_its_cause_and_leaves_nothing_behind(
    nats_server: NatsServer, namespace: str
) -> None:
    async def start(service: Service, settings: CommonSettings) -> App:
        await service.register()
        raise LookupError("no model")

    async def run() -> None:
        async with running_service(nats_server.url, namespace, start=start):
            raise AssertionError("it must not come up")

    async with running_service(nats_server.url, namespace, name="router") as watcher:
        with pytest.raises(LookupError, match="no model"):
            await run()
        await eventually(lambda: watcher.directory.instances("worker") == [])


async def test_a_service_whose_id_is_taken_by_a_newer_one_ends(nats_server: NatsServer, namespace: str) -> None:
    async def run() -> None:
        async with (
            running_service(nats_server.url, namespace, instance_id="w", lease_ttl_s=2) as old,
            running_service(nats_server.url, namespace, instance_id="w", lease_ttl_s=2) as new,
        ):
            assert new.incarnation > old.incarnation
            await eventually(lambda: old._tasks.closed)
            await eventually(lambda: (r := new.directory.get("w")) and r.incarnation == new.incarnation)

    with pytest.raises(Superseded):
        await run()


async def test_draining_is_told_to_the_app_once_and_the_record_stays_until_it_is_closed(
    nats_server: NatsServer, namespace: str
) -> None:
    apps: list[IdleApp] = []
    seen: list[bool] = []

    async with running_service(nats_server.url, namespace, name="router") as watcher:

        class Draining(IdleApp):
            async def drain(self, reason: str) -> None:
                await super().drain(reason)
                await eventually(lambda: [r.draining for r in watcher.directory.instances("worker")] == [True])
                seen.append(True)

        async def start(service: Service, settings: CommonSettings) -> App:
            await service.register()
            apps.append(Draining())
            return apps[0]

        async with running_service(nats_server.url, namespace, start=start) as service:
            await eventually(lambda: watcher.directory.instances("worker"))
            service.stop("told to")
            service.stop("told again")
        assert seen == [True]
        assert (apps[0].drained, apps[0].closed) == (["told to"], 1)
        await eventually(lambda: watcher.directory.instances("worker") == [])


async def test_a_failing_drain_and_close_do_not_stop_the_end(nats_server: NatsServer, namespace: str) -> None:
    class Broken(IdleApp):
        async def drain(self, reason: str) -> None:
            raise LookupError

        async def close(self) -> None:
            raise LookupError

    async def start(service: Service, settings: CommonSettings) -> App:
        return Broken()

    async with running_service(nats_server.url, namespace, start=start):
        pass


async def test_it_is_ready_only_when_its_app_is_up(nats_server: NatsServer, namespace: str) -> None:
    service: Service | None = None
    may_come_up = asyncio.Event()

    async def start(given: Service, _settings: CommonSettings) -> IdleApp:
        nonlocal service
        service = given
        await may_come_up.wait()
        return IdleApp()

    async def run() -> None:
        async with host("probe", CommonSettings(nats=nats_server.url, namespace=namespace, health_port=-1), start):
            assert service is not None
            assert service.health.ready

    hosted = asyncio.create_task(run())
    await eventually(lambda: service is not None and service.health.is_ok("bus"))
    assert service is not None
    assert not service.health.ready
    may_come_up.set()
    await hosted


async def test_readiness_follows_the_bus(namespace: str) -> None:
    with NatsServer() as server:
        async with running_service(server.url, namespace) as service:
            assert service.health.ready
            server.kill()
            await eventually(lambda: not service.health.ready)
            server.start()
            await eventually(lambda: service.health.ready)


async def test_srv_ping_info_and_stats_are_answered(nats_server: NatsServer, namespace: str) -> None:
    async def handler(message: Message, context: RequestContext) -> Message:
        return Done()

    settings = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="w.1", health_port=-1)

    async def start(service: Service, own: CommonSettings) -> App:
        await service.bus.serve(service.bus.subjects.control("w.1"), [Cancel], handler, queue="q")
        return IdleApp()

    async with host("worker", settings, start) as running:
        bus = running.service.bus
        subject = bus.subjects.control("w.1")
        await bus.request(subject, Cancel(request_id="r", reason="x"), Done, timeout_s=WAIT_S)

        async def ask(verb: str) -> dict[str, Any]:
            reply = await bus.request_bytes(f"$SRV.{verb}.kvbus-worker.w%2E1", b"", timeout_s=WAIT_S)
            return msgspec.json.decode(reply.data, type=dict[str, Any])

        ping, info, stats = await ask("PING"), await ask("INFO"), await ask("STATS")
        assert ping["type"] == "io.nats.micro.v1.ping_response"
        assert (ping["name"], ping["id"]) == ("kvbus-worker", "w%2E1")
        assert [e["subject"] for e in info["endpoints"]] == [subject]
        (endpoint,) = stats["endpoints"]
        assert (endpoint["num_requests"], endpoint["num_errors"], endpoint["queue_group"]) == (1, 0, "q")
        for name in ("$SRV.PING", "$SRV.PING.kvbus-worker"):
            reply = await bus.request_bytes(name, b"", timeout_s=WAIT_S)
            assert json.loads(reply.data)["name"] == "kvbus-worker"


def test_check_config_prints_and_ends_with_status_0(program: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", program, "check-config", "--namespace", "n"], capture_output=True, text=True, check=True
    )
    assert 'namespace = "n"' in result.stdout
