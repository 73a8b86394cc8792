"""Wires the indexer: the KV stream and the directory in, answers out."""

import asyncio

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.adapters.metrics import CatalogMetrics
from kvbus_indexer.adapters.repairer import Repairer
from kvbus_indexer.adapters.snapshots import SnapshotClient
from kvbus_indexer.core.catalog import Catalog
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

QUEUE = "indexers"


class IndexerApp:
    """See the README. It answers only once it has read the whole stream: half an index would send requests astray."""

    def __init__(self, service: Service, settings: IndexerSettings) -> None:
        self._service = service
        self._settings = settings
        clock = asyncio.get_running_loop().time
        metrics = CatalogMetrics(service.metrics)
        self.catalog = Catalog(settings.limits, PlainIndex, metrics.count)
        metrics.watch(self.catalog)
        client = SnapshotClient(service.bus, settings.snapshot_timeout_s, settings.snapshot_max_parts)
        self._repairer = Repairer(
            self.catalog,
            client,
            spawn=service.spawn,
            metrics=service.metrics,
            health=service.health,
            log=service.log,
        )
        changed = self._repairer.wake
        self._instances = InstanceHandler(self.catalog, clock=clock, changed=changed)
        self._events = EventHandler(
            self.catalog, clock=clock, changed=changed, metrics=service.metrics, log=service.log
        )
        self._queries = QueryHandler(self.catalog, settings.max_query_keys, service.metrics)
        self._caught_up = asyncio.Event()
        self._inputs: list[Subscription | OrderedConsumer] = []
        self._answers: Subscription | None = None

    async def open(self) -> None:
        """Returns when the stream is read and questions are answered."""
        bus = self._service.bus
        self._service.spawn(self._repairer.run(), name="repairer")
        self._service.directory.on_change(self._instances.on_change)
        bus.on_reconnect(self._instances.on_reconnect)
        self._inputs.append(await bus.subscribe(bus.subjects.load("*"), [LoadReport], self._instances.on_load))
        events = bus.subjects.kv_events("*", "*")
        # Makes the stream if need be, and tries until it is there.
        self._inputs.append(await EventLog(bus).follow(events, self._events, on_caught_up=self._on_caught_up))
        await self._caught_up.wait()
        self._answers = await bus.serve(
            bus.subjects.index_query("*"),
            [IndexQuery],
            self._queries,
            queue=QUEUE,
            max_pending=self._settings.max_pending_queries,
        )
        await self._service.register()

    def _on_caught_up(self) -> None:
        self._instances.on_caught_up()
        self._caught_up.set()

    async def drain(self, reason: str) -> None:
        if self._answers is not None:
            await self._answers.stop()

    async def close(self) -> None:
        self._repairer.stop()
        while self._inputs:
            await self._inputs.pop().stop()


async def start(service: Service, settings: IndexerSettings) -> IndexerApp:
    app = IndexerApp(service, settings)
    await app.open()
    return app
