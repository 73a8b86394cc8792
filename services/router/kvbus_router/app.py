"""Wires the router: the directory, load and progress in; placements out."""

import asyncio
import time
from random import Random

from kvbus_router.adapters.index import IndexClient
from kvbus_router.adapters.limits import LimitsStore
from kvbus_router.adapters.metrics import RouterMetrics
from kvbus_router.adapters.policies import PolicyFailures, make_policy
from kvbus_router.adapters.policy_classes import ClassesFile, load_classes
from kvbus_router.core.dispatcher import Dispatcher
from kvbus_router.core.limits import Thresholds
from kvbus_router.core.policy_classes import PolicyClasses
from kvbus_router.handlers.cluster import ClusterHandler
from kvbus_router.handlers.control import ControlHandler
from kvbus_router.handlers.route import RouteHandler
from kvbus_router.settings import RouterSettings
from kvbus_runtime.bus import Subscription
from kvbus_runtime.discovery import Change
from kvbus_runtime.service import Service
from kvbus_wire.load import LoadReport
from kvbus_wire.message import Message
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, ExplainPlaced, ExplainRoute, GetLimits, Progress, RouteRequest, SetLimits

QUEUE = "routers"
LIMITS_WAIT_S = 5.0
MAX_PENDING_CONTROL = 64
"""Questions and changes that people and tools may ask at the same time."""


class RouterApp:
    """See the README."""

    def __init__(self, service: Service, settings: RouterSettings, classes: PolicyClasses, content: bytes) -> None:
        """``content``: of the file of policy classes."""
        self._service = service
        self._settings = settings
        self._clock = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._heard = asyncio.Event()
        self._inputs: list[Subscription] = []
        self._requests: Subscription | None = None
        self._control: list[Subscription] = []
        self.dispatcher = Dispatcher(
            service.instance_id,
            settings.limits,
            settings.weights,
            make_policy(settings.policy, temperature_s=settings.temperature_s),
            Random(),
            unix_ms=lambda: time.time_ns() // 1_000_000,
            classes=classes,
            policy_failed=PolicyFailures(self._clock, service.metrics, service.log),
        )
        metrics = self._metrics = RouterMetrics(service.metrics, self.dispatcher, self._clock)
        metrics.classes(classes)
        self._classes_file = ClassesFile(
            settings.policy_classes,
            content,
            settings.policy_classes_poll_s,
            apply=self._apply_classes,
            metrics=service.metrics,
            log=service.log,
        )
        index = self._index = IndexClient(
            service.bus,
            timeout_s=settings.index_timeout_s,
            failures=settings.index_failures,
            pause_s=settings.index_pause_s,
            rng=Random(),
            metrics=service.metrics,
            log=service.log,
        )
        self._route = RouteHandler(
            self.dispatcher, index, service.bus, metrics=metrics, changed=self._wake.set, log=service.log
        )
        self._limits = LimitsStore(
            service.bus,
            service.instance_id,
            settings.limits.thresholds,
            apply=self._apply,
            metrics=service.metrics,
            log=service.log,
        )
        self._on_control = ControlHandler(self.dispatcher, index, self._limits)
        self._cluster = ClusterHandler(
            self.dispatcher,
            service.instance_id,
            clock=self._clock,
            settle=self._route.settle,
            changed=self._changed,
            metrics=metrics,
        )

    async def open(self) -> None:
        bus, subjects = self._service.bus, self._service.bus.subjects
        self._report_health()
        self._service.directory.on_change(self._cluster.on_change)
        self._service.directory.on_change(self._count_routers)
        self._service.directory.on_change(self._name_indexers)
        self._service.directory.on_change(self._report_health)
        self._inputs = [
            await bus.subscribe(subjects.load("*"), [LoadReport], self._cluster.on_load),
            await bus.subscribe(subjects.progress("*"), [Progress], self._cluster.on_progress),
            await bus.subscribe(subjects.decisions("*"), [Decision], self._cluster.on_decision),
        ]
        await self._limits.start(LIMITS_WAIT_S)
        self._service.spawn(self._watch_queue(), name="queue")
        if self._settings.policy_classes:
            self._service.spawn(self._classes_file.follow(), name="policy classes")
        self._control = [await self._serve_control(subjects.routers_control, QUEUE)]
        self._control += [await self._serve_control(subjects.router_control(self._service.instance_id), "")]
        await self._service.register()
        await self._hear_workers()
        self._requests = await bus.serve(
            subjects.route("*"),
            [RouteRequest],
            self._route,
            queue=QUEUE,
            max_pending=self._settings.max_pending_requests,
        )

    async def _hear_workers(self) -> None:
        """Workers report to a router that joins. One that does not wait for that takes all of them for idle."""
        state = self.dispatcher.state
        try:
            async with asyncio.timeout(self._settings.load_wait_s):
                while state.unheard():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            self._service.log.warning("workers_silent", workers=state.unheard())

    async def _serve_control(self, subject: str, queue: str) -> Subscription:
        questions: list[type[Message]] = [ExplainRoute, ExplainPlaced, GetLimits, SetLimits]
        return await self._service.bus.serve(
            subject, questions, self._on_control, queue=queue, max_pending=MAX_PENDING_CONTROL
        )

    def _apply(self, thresholds: Thresholds) -> None:
        self.dispatcher.set_thresholds(thresholds)
        self._pump()

    def _apply_classes(self, classes: PolicyClasses) -> None:
        self.dispatcher.set_classes(classes)
        self._metrics.classes(classes)
        self._pump()

    def _pump(self) -> None:
        self._route.settle(self.dispatcher.pump(self._clock()))
        self._wake.set()

    def _changed(self) -> None:
        self._wake.set()
        self._heard.set()

    def _count_routers(self, record: InstanceRecord, _change: Change) -> None:
        if record.service == "router":
            routers = self._service.directory.instances("router")
            self.dispatcher.set_routers(router.instance_id for router in routers)

    def _name_indexers(self, record: InstanceRecord, _change: Change) -> None:
        if record.service == "indexer":
            indexers = self._service.directory.instances("indexer")
            self._index.set_indexers(record.instance_id for record in indexers if not record.draining)

    def _report_health(self, *_change: object) -> None:
        """Without a worker nothing can be placed. Without an indexer everything can, only worse: no reason to be unready."""
        health, workers = self._service.health, self.dispatcher.state.worker_count
        health.set("workers", workers > 0, f"{workers} for {', '.join(self.dispatcher.state.models) or 'no model'}")
        indexers = len(self._service.directory.instances("indexer"))
        health.set("index", True, f"{indexers} indexers" if indexers else "degraded: no indexer, so no cache knowledge")

    async def _watch_queue(self) -> None:
        """Ends the wait of those whose time is over. Sleeps as long as nobody waits."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout_at(self.dispatcher.next_due()):
                    await self._wake.wait()
            except TimeoutError:
                self._route.settle(self.dispatcher.pump(self._clock()))

    async def drain(self, reason: str) -> None:
        self._route.stop()
        if self._requests is not None:
            await self._requests.stop()

    async def close(self) -> None:
        await self._limits.stop()
        for subscriptions in (self._control, self._inputs):
            while subscriptions:
                await subscriptions.pop().stop()


async def start(service: Service, settings: RouterSettings) -> RouterApp:
    classes, content = await asyncio.to_thread(load_classes, settings.policy_classes)
    app = RouterApp(service, settings, classes, content)
    await app.open()
    return app
