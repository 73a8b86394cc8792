"""The host of a service: settings in, exit status out.

    start:     logs -> health server -> bus -> directory -> app (which registers when it is ready to take work)
    SIGTERM:   not ready, record says draining -> app.drain (until the deadline, then cancelled) -> app.close
               -> record removed -> flush -> close

The record outlives the drain, so that requests in flight are not taken for lost; routers place nothing on a draining instance.
Exit status: 0 stopped as asked, 1 a task crashed (the log holds the cause), 2 bad configuration, 3 forced by a second signal.
"""

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import uvloop

from kvbus_runtime import log as logs
from kvbus_runtime.bus import Bus
from kvbus_runtime.discovery import Directory, Registration
from kvbus_runtime.errors import Superseded, UnsupportedServer
from kvbus_runtime.health import Health, HealthServer
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.micro import MicroResponder
from kvbus_runtime.settings import EXIT_BAD_CONFIG, BadSettings, CommonSettings, effective
from kvbus_runtime.tasks import Tasks
from kvbus_wire.records import InstanceRecord, KvbmRecord, WorkerRecord

EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_FORCED = 3

CANCELLED_DRAIN_S = 4.0
"""After the drain deadline: time for the app to give every request its terminal event."""
CLOSE_S = 8.0
FORCED_EXIT_S = 5.0
FAREWELL_S = 2.0
LAST_S = 5.0
"""For the connections of the bus and the health server, which have bounds of their own."""
LONGEST_END_S = CANCELLED_DRAIN_S + CLOSE_S + 2 * FAREWELL_S + LAST_S
"""What ends later than this after its drain deadline hangs: whoever ends it may kill it."""

S = TypeVar("S", bound=CommonSettings)
T = TypeVar("T")


class App(Protocol):
    """What a service's composition root returns."""

    async def drain(self, reason: str) -> None:
        """Stop taking work and finish what is in flight. Cancelled at the deadline: then end the rest with ``reason``."""

    async def close(self) -> None:
        """Free resources, after `drain`. Idempotent."""


StartApp = Callable[["Service", S], Awaitable[App]]


@cache
def kvbus_version() -> str:
    try:
        return version("kvbus")
    except PackageNotFoundError:
        return "0.0.0"


class Service:
    """What an app gets from its host. Everything spawned here is owned by one task group."""

    def __init__(self, name: str, settings: CommonSettings, tasks: Tasks, bus_tasks: Tasks) -> None:
        self.name = name
        self.settings = settings
        self.instance_id = settings.instance_id or f"{name}-{secrets.token_hex(4)}"
        self.incarnation = time.time_ns() // 1_000_000
        self.host_id = settings.host_id or socket.gethostname()
        self.log: Any = logs.get_logger(service=name, instance=self.instance_id)
        self.metrics = Metrics(name)
        self.health = Health(self.metrics)
        self._tasks = tasks
        self.bus = Bus(
            settings, name=self.instance_id, log=self.log, metrics=self.metrics, tasks=tasks, link_tasks=bus_tasks
        )
        self.directory = Directory(self.bus, settings.lease_ttl_s)
        self._registration = Registration(self.bus, settings.lease_ttl_s)
        self._record: InstanceRecord | None = None
        self.health_url = ""
        self._stop = asyncio.Event()
        self._stop_reason = ""

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task that belongs to the service; if it raises, the service ends with that cause."""
        return self._tasks.spawn(coro, name=name)

    async def register(
        self, *, worker: WorkerRecord | None = None, kvbm: KvbmRecord | None = None, loading: str = ""
    ) -> None:
        """Publish the instance record, kept under a lease from now on; again: update it. Raise Superseded."""
        self._record = InstanceRecord(
            service=self.name,
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            version=kvbus_version(),
            started_ms=self.incarnation,
            draining=self.stopping,
            health_url=self.health_url,
            worker=worker,
            kvbm=kvbm,
            loading=loading,
        )
        await self._registration.set(self._record)

    def stop(self, reason: str) -> None:
        """Begin the orderly end, as SIGTERM does."""
        if not self._stop.is_set():
            self._stop_reason = reason
            self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def _open(self) -> None:
        self.health.set("running", False, "starting")
        self.health.set("bus", False, "connecting")
        self.bus.on_disconnect(lambda: self.health.set("bus", False, "disconnected"))
        self.bus.on_reconnect(lambda: self.health.set("bus", True, "connected"))
        await self.bus.start()
        await self.directory.start()
        responder = MicroResponder(
            self.bus,
            service=self.name,
            instance_id=self.instance_id,
            version=kvbus_version(),
            metadata={"namespace": self.settings.namespace, "host": self.host_id, "health": self.health_url},
        )
        await responder.start()
        self.health.set("bus", True, "connected")

    async def _mark_draining(self) -> None:
        self.health.set("running", False, f"stopping: {self._stop_reason}")
        if self._record is not None:
            self._record = _draining(self._record)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._registration.set(self._record)

    async def _drain(self, app: App) -> None:
        self.log.info("draining", reason=self._stop_reason, timeout_s=self.settings.drain_timeout_s)
        await self._mark_draining()
        drain = self.spawn(_logged(app.drain(self._stop_reason), self.log, "drain_failed"), name="drain")
        await asyncio.wait([drain], timeout=self.settings.drain_timeout_s)
        if not drain.done():
            self.log.warning("drain_deadline", timeout_s=self.settings.drain_timeout_s)
            drain.cancel()
            await asyncio.wait([drain], timeout=CANCELLED_DRAIN_S)

    async def _close_app(self, app: App) -> None:
        close = self.spawn(_logged(app.close(), self.log, "close_failed"), name="close")
        await asyncio.wait([close], timeout=CLOSE_S)

    async def _farewell(self, crashed_app: App | None, cause: str) -> None:
        """Runs outside of the service's task group, so also after a crash. ``cause``: of an end that nobody has asked for."""
        if crashed_app is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await _logged(crashed_app.close(), self.log, "close_failed")
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._registration.remove()
        await self.bus.close()
        self.log.info("stopped", reason=self._stop_reason or cause)


def _draining(record: InstanceRecord) -> InstanceRecord:
    return msgspec.structs.replace(record, draining=True)


async def _logged(work: Awaitable[None], log: Any, event: str) -> None:
    """The end goes on whatever a step of it raises, but not silently."""
    try:
        await work
    except Exception:
        log.exception(event)


async def _serve(
    name: str,
    settings: S,
    start: StartApp[S],
    *,
    started: Callable[[Service, App], None],
    created: Callable[[Service], None],
) -> None:
    """Run a service until `Service.stop`. Raise the first cause of a crash.

    The connection lives in a task group around the service's own, so that a crashed service can still take its record back.
    """
    async with Tasks() as bus_tasks:
        service: Service | None = None
        server: HealthServer | None = None
        app: App | None = None
        cause = ""
        try:
            async with Tasks() as tasks:
                service = Service(name, settings, tasks, bus_tasks)
                created(service)
                service.log.info("settings", **effective(settings))
                if settings.health_port >= 0:
                    server = HealthServer(service.health, settings.health_host, settings.health_port)
                    await server.start()
                    service.health_url = server.url
                app = await _start_app(service, settings, start)
                if app is not None:
                    service.log.info("started", health=service.health_url, incarnation=service.incarnation)
                    started(service, app)
                    await service._stop.wait()
                    await service._drain(app)
                    closing, app = app, None
                    await service._close_app(closing)
        except BaseException as problem:
            cause = type(problem).__name__
            raise
        finally:
            if service is not None:
                await service._farewell(app, cause)
            if server is not None:
                await server.stop()


async def _start_app(service: Service, settings: S, start: StartApp[S]) -> App | None:
    """None when the service is told to stop before the app is up (a bus that never comes, say)."""

    async def bring_up() -> App:
        await service._open()
        app = await start(service, settings)
        service.health.set("running", True)
        return app

    up = service.spawn(bring_up(), name="start")
    stop = service.spawn(_wait(service._stop), name="stop")
    await asyncio.wait([up, stop], return_when=asyncio.FIRST_COMPLETED)
    if up.done():
        stop.cancel()
        return up.result()
    up.cancel()
    await asyncio.wait([up], timeout=CANCELLED_DRAIN_S)
    return None


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


class RunningService(Generic[S]):
    """A service hosted in this process."""

    def __init__(self, service: Service, app: App) -> None:
        self.service = service
        self.app = app


@asynccontextmanager
async def host(name: str, settings: S, start: StartApp[S]) -> AsyncIterator[RunningService[S]]:
    """Run a service in this event loop, for tests and tools; leaving the block stops it in order, and raises if it crashed."""
    up: asyncio.Future[RunningService[S]] = asyncio.get_running_loop().create_future()
    holder: list[Service] = []

    def started(service: Service, app: App) -> None:
        if not up.done():
            up.set_result(RunningService(service, app))

    task = asyncio.create_task(_serve(name, settings, start, started=started, created=holder.append), name=name)
    try:
        waiting: set[asyncio.Future[Any]] = {task, up}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            raise RuntimeError(f"{name} ended before it was up")
        yield up.result()
    finally:
        up.cancel()
        for service in holder:
            service.stop("the host ends")
        if not task.done() and not holder:
            task.cancel()
        if not task.done() or task.exception() is not None:
            await task


def run_service(name: str, settings: S, start: StartApp[S]) -> int:
    """The main program of a service; returns its exit status."""
    logs.configure(settings.log_level, settings.log_format)
    log = logs.get_logger(service=name)
    forced = False

    async def main() -> None:
        nonlocal forced
        loop = asyncio.get_running_loop()
        holder: list[Service] = []
        task = asyncio.create_task(
            _serve(name, settings, start, started=lambda _service, _app: None, created=holder.append), name=name
        )

        def on_signal(received: signal.Signals) -> None:
            nonlocal forced
            if holder and not holder[0].stopping:
                holder[0].stop(received.name)
            else:
                if not forced:
                    # Whatever hangs (a thread that computes, say): this ends it.
                    timer = threading.Timer(FORCED_EXIT_S, os._exit, (EXIT_FORCED,))
                    timer.daemon = True
                    timer.start()
                forced = True
                log.warning("forced", signal=received.name)
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await task

    try:
        uvloop.run(main())
    except BadSettings as problem:
        log.error("bad_settings", error=str(problem))
        return EXIT_BAD_CONFIG
    except Superseded as problem:
        log.error(
            "superseded", error=str(problem), hint="two processes have the same --instance-id; the newer one goes on"
        )
        return EXIT_CRASHED
    except UnsupportedServer as problem:
        log.error("unsupported_server", error=str(problem))
        return EXIT_CRASHED
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_FORCED if forced else EXIT_CRASHED
    except Exception:
        log.exception("crashed")
        return EXIT_CRASHED
    return EXIT_STOPPED
