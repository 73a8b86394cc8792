"""Wires the indexer: the KV stream, the directory and routing decisions in, answers out."""

import asyncio
from random import Random

from kvbus_indexer.adapters.checkpoints import Checkpoints, CheckpointSettings
from kvbus_indexer.adapters.indexes import MakeIndex, index_maker
from kvbus_indexer.adapters.metrics import CatalogMetrics
from kvbus_indexer.adapters.repairer import Repairer
from kvbus_indexer.adapters.replays import ReplayClient
from kvbus_indexer.adapters.snapshots import SnapshotClient
from kvbus_indexer.adapters.source_watch import SourceWatch
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.usage import Usage
from kvbus_indexer.handlers.control import CONTROL_MESSAGES, ControlHandler
from kvbus_indexer.handlers.decisions import DecisionHandler
from kvbus_indexer.handlers.events import EventHandler
from kvbus_indexer.handlers.instances import InstanceHandler
from kvbus_indexer.handlers.query import QueryHandler
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime.bus import Subscription
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.ordered import OrderedConsumer
from kvbus_runtime.service import Service
from kvbus_wire.indexer import IndexQuery
from kvbus_wire.load import LoadReport
from kvbus_wire.router import Decision, Progress

QUEUE = "indexers"


class IndexerApp:
    """See the README. It answers only once it has read the whole stream: half an index would send requests astray."""

    def __init__(self, service: Service, settings: IndexerSettings, make_index: MakeIndex) -> None:
        self._service = service
        self._settings = settings
        clock = asyncio.get_running_loop().time
        metrics = CatalogMetrics(service.metrics, clock)
        self.catalog = Catalog(settings.limits, make_index, metrics, metrics.prediction_ended)
        metrics.watch(self.catalog)
        usage = Usage(settings.max_used_prefixes, settings.use_halving_s)
        self._repairer = self._make_repairer()
        self.checkpoints = self._make_checkpoints()
        self._sources = SourceWatch(self.catalog, service.log)
        changed = self._repairer.wake
        self._instances = InstanceHandler(self.catalog, clock=clock, changed=changed)
        self._events = EventHandler(
            self.catalog, clock=clock, changed=changed, metrics=service.metrics, log=service.log
        )
        self._decisions = DecisionHandler(self.catalog, clock=clock, metrics=service.metrics)
        self._queries = QueryHandler(self.catalog, usage, settings.max_query_keys, clock=clock, metrics=service.metrics)
        self._control = ControlHandler(
            self.catalog,
            usage,
            indexer_id=service.instance_id,
            stream=self._stream,
            checkpoint_age_s=lambda: self.checkpoints.age_s,
            clock=clock,
        )
        self._caught_up = asyncio.Event()
        self._inputs: list[Subscription | OrderedConsumer] = []
        self._consumer: OrderedConsumer | None = None
        self._background: list[asyncio.Task[None]] = []
        self._answers: list[Subscription] = []

    def _make_repairer(self) -> Repairer:
        service, settings = self._service, self._settings
        return Repairer(
            self.catalog,
            ReplayClient(service.bus, settings.replay_max_messages, service.log),
            SnapshotClient(service.bus, settings.snapshot_timeout_s, settings.snapshot_max_parts),
            spawn=service.spawn,
            metrics=service.metrics,
            health=service.health,
            log=service.log,
        )

    def _make_checkpoints(self) -> Checkpoints:
        service, settings = self._service, self._settings
        return Checkpoints(
            self.catalog,
            service.bus,
            CheckpointSettings(
                interval_s=settings.checkpoint_interval_s,
                keep=settings.checkpoint_keep,
                max_bytes=settings.checkpoint_max_bytes,
                max_age_s=settings.checkpoint_max_age_s,
            ),
            indexer_id=service.instance_id,
            stream=self._stream,
            rng=Random(service.instance_id),
            metrics=service.metrics,
            log=service.log,
        )

    def _stream(self) -> str:
        return self._consumer.created if self._consumer is not None else ""

    async def open(self) -> None:
        """Returns when the stream is read and questions are answered."""
        service, settings = self._service, self._settings
        bus, subjects = service.bus, service.bus.subjects
        service.spawn(self._repairer.run(), name="repairer")
        service.directory.on_change(self._instances.on_change)
        bus.on_reconnect(self._instances.on_reconnect)
        self._inputs += [
            await bus.subscribe(subjects.load("*"), [LoadReport], self._instances.on_load),
            await bus.subscribe(subjects.decisions("*"), [Decision], self._decisions.on_decision),
            await bus.subscribe(subjects.progress("*"), [Progress], self._decisions.on_progress),
        ]
        await self._read_stream()
        self._background.append(service.spawn(self._sources.run(), name="event sources"))
        if settings.checkpoint_interval_s:
            self._background.append(service.spawn(self.checkpoints.run(), name="checkpoints"))
        queries = ((subjects.index_query("*"), QUEUE), (subjects.indexer_query(service.instance_id), ""))
        self._answers += [
            *[
                await bus.serve(
                    subject, [IndexQuery], self._queries, queue=queue, max_pending=settings.max_pending_queries
                )
                for subject, queue in queries
            ],
            await bus.serve(
                subjects.indexer_control(service.instance_id),
                CONTROL_MESSAGES,
                self._control,
                max_pending=settings.max_pending_questions,
            ),
        ]
        await service.register()

    async def _read_stream(self) -> None:
        """From what was saved last, or from the beginning, to the end; then goes on reading."""
        saved = await self.checkpoints.restore() if self._settings.checkpoint_interval_s else None
        bus = self._service.bus
        # Makes the stream if need be, and tries until it is there.
        self._consumer = await EventLog(bus).follow(
            bus.subjects.kv_events("*", "*"),
            self._events,
            from_seq=None if saved is None else saved.stream_seq + 1,
            stream_created="" if saved is None else saved.stream,
            on_caught_up=self._on_caught_up,
            on_replaced=self._instances.on_stream_replaced,
        )
        self._inputs.append(self._consumer)
        await self._caught_up.wait()

    def _on_caught_up(self) -> None:
        self._instances.on_caught_up()
        self._caught_up.set()

    async def drain(self, reason: str) -> None:
        while self._answers:
            await self._answers.pop().stop()

    async def close(self) -> None:
        self._repairer.stop()
        for task in self._background:
            task.cancel()
        while self._inputs:
            await self._inputs.pop().stop()


async def start(service: Service, settings: IndexerSettings) -> IndexerApp:
    service.health.set("index", False, "compiling")
    make_index = await index_maker(settings.index, settings.limits, service.log)
    app = IndexerApp(service, settings, make_index)
    await app.open()
    return app
