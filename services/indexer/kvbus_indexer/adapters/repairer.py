"""Fetches what the catalog asks for, when it asks for it: messages of the stream, or snapshots of instances."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvbus_indexer.adapters.replays import ReplayClient
from kvbus_indexer.adapters.snapshots import SnapshotClient
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import Order, Phase, Replay
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.health import Health
from kvbus_runtime.metrics import Metrics

Spawn = Callable[..., asyncio.Task[Any]]


class Repairer:
    """`run` sleeps until `wake` is called or the catalog's next time comes."""

    def __init__(
        self,
        catalog: Catalog,
        replays: ReplayClient,
        snapshots: SnapshotClient,
        *,
        spawn: Spawn,
        metrics: Metrics,
        health: Health,
        log: Any,
    ) -> None:
        self._catalog = catalog
        self._repairs = catalog.repairs
        self._replays = replays
        self._snapshots = snapshots
        self._spawn = spawn
        self._health = health
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._stopped = False
        self._counted = metrics.counter("repairs", "repairs by way, reason and outcome", ("way", "reason", "outcome"))
        self._seconds = metrics.histogram("repair_seconds", "time to fetch and apply what was missing", ("way",))

    def wake(self) -> None:
        """Cheap; call it after each change of the catalog."""
        if self._repairs.attention:
            self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            for order in self._repairs.due(self._clock()):
                self._spawn(self._repair(order), name=f"repair {order.instance_id}")
            self._report()
            due = self._repairs.next_due()
            try:
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _report(self) -> None:
        """Catching up is what readiness means; a repair is a detail of it."""
        catalog = self._catalog
        in_repair = catalog.instances - self._repairs.in_phase(Phase.LIVE)
        detail = f"{catalog.content.entries} entries of {catalog.instances} instances, {in_repair} in repair"
        if catalog.partial_instances:
            detail += f", {catalog.partial_instances} partial: the index is full"
        self._health.set("index", catalog.caught_up, detail if catalog.caught_up else "reading the event stream")

    async def _repair(self, order: Order) -> None:
        started = self._clock()
        way = "snapshot" if order.replay is None else "replay"
        outcome = "superseded"
        try:
            fetched = await (self._snapshot(order) if order.replay is None else self._replay(order, order.replay))
            if self._repairs.finish(order, self._clock()):
                outcome = "done"
            elif fetched and order.replay is not None:
                outcome = "not_in_stream"
        except RequestFailed as failure:
            outcome = failure.code
            self._log.warning("repair_failed", peer=order.instance_id, way=way, reason=order.reason, error=str(failure))
        finally:
            # Whatever else happened: an order that is still open would block its instance for ever.
            self._repairs.fail(order, self._clock())
            self._wake.set()
        seconds = self._clock() - started
        self._counted.labels(way, order.reason, outcome).inc()
        self._seconds.labels(way).observe(seconds)
        self._log.info(
            "repaired",
            peer=order.instance_id,
            way=way,
            reason=order.reason,
            outcome=outcome,
            seconds=round(seconds, 4),
        )

    async def _snapshot(self, order: Order) -> bool:
        async for part in self._snapshots.parts(order.instance_id):
            if not self._repairs.chunk(order, part, self._clock()):
                return False
            await asyncio.sleep(0)
        return True

    async def _replay(self, order: Order, replay: Replay) -> bool:
        for stream_seq, batch in await self._replays.batches(order.instance_id, replay):
            if not self._repairs.replay(order, batch, stream_seq, self._clock()):
                return False
            await asyncio.sleep(0)
        return True
