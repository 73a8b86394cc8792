"""Fetches the snapshots that the catalog asks for, when it asks for them."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvbus_indexer.adapters.snapshots import SnapshotClient
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import Order, Phase
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.health import Health
from kvbus_runtime.metrics import Metrics

Spawn = Callable[..., asyncio.Task[Any]]


class Repairer:
    """`run` sleeps until `wake` is called or the catalog's next time comes."""

    def __init__(
        self, catalog: Catalog, client: SnapshotClient, *, spawn: Spawn, metrics: Metrics, health: Health, log: Any
    ) -> None:
        self._catalog = catalog
        self._client = client
        self._spawn = spawn
        self._health = health
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._stopped = False
        self._repairs = metrics.counter("repairs", "snapshots fetched", ("reason", "outcome"))
        self._seconds = metrics.histogram("repair_seconds", "time to fetch and apply a snapshot")

    def wake(self) -> None:
        """Cheap; call it after each change of the catalog."""
        if self._catalog.attention:
            self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            for order in self._catalog.due(self._clock()):
                self._spawn(self._repair(order), name=f"repair {order.instance_id}")
            self._report()
            due = self._catalog.next_due()
            try:
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _report(self) -> None:
        """Catching up is what readiness means; a repair is a detail of it."""
        catalog = self._catalog
        in_repair = catalog.instances - catalog.in_phase(Phase.LIVE)
        detail = f"{catalog.content.entries} entries of {catalog.instances} instances, {in_repair} in repair"
        if catalog.partial_instances:
            detail += f", {catalog.partial_instances} partial: the index is full"
        self._health.set("index", catalog.caught_up, detail if catalog.caught_up else "reading the event stream")

    async def _repair(self, order: Order) -> None:
        started = self._clock()
        outcome = "superseded"
        try:
            if await self._fetch(order) and self._catalog.finish(order, self._clock()):
                outcome = "done"
        except RequestFailed as failure:
            outcome = failure.code
            self._catalog.fail(order, self._clock())
            self._log.warning("repair_failed", instance=order.instance_id, reason=order.reason, error=str(failure))
        finally:
            # Whatever else happened: an order that is still open would block its instance for ever.
            self._catalog.fail(order, self._clock())
            self._wake.set()
        seconds = self._clock() - started
        self._repairs.labels(order.reason, outcome).inc()
        self._seconds.observe(seconds)
        self._log.info(
            "repaired", instance=order.instance_id, reason=order.reason, outcome=outcome, seconds=round(seconds, 4)
        )

    async def _fetch(self, order: Order) -> bool:
        async for part in self._client.parts(order.instance_id):
            if not self._catalog.chunk(order, part, self._clock()):
                return False
            await asyncio.sleep(0)
        return True
