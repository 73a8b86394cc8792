"""What the indexers say of themselves, and what is predicted, over the bus."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvbus_indexer.app import start
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime.service import RunningService, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.index_events import decision
from kvbus_testkit.instances import FakeInstance, block_keys, fake_worker
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_testkit.up import run_kvbus
from kvbus_wire.indexer import (
    DescribeIndex,
    IndexDescription,
    IndexQuery,
    IndexReply,
    IndexUse,
    RankPrefixes,
    SilentWorker,
)
from kvbus_wire.router import Progress

MODEL = "tiny/model"


class Cluster:
    """Two indexers, a worker with events and one without."""

    def __init__(self, where: tuple[str, ...], worker: FakeInstance, mute: FakeInstance) -> None:
        self.where = where
        self.worker = worker
        self.mute = mute
        self.indexers: list[RunningService[IndexerSettings]] = []

    async def tool(self, *arguments: str) -> tuple[int, Any]:
        result = await asyncio.to_thread(run_kvbus, *arguments, "--json", *self.where)
        assert result.stdout, result.stderr
        return result.returncode, json.loads(result.stdout)

    async def ask(self, *numbers: int, counts: bool = True) -> dict[tuple[str, bool], int]:
        bus = self.worker.service.bus
        query = IndexQuery(model=MODEL, keys=block_keys(*numbers), counts=counts)
        reply: IndexReply = await bus.request(bus.subjects.index_query(MODEL), query, IndexReply, timeout_s=5.0)
        return {(match.instance_id, match.predicted): match.depth for match in reply.matches}

    async def decide(self, request_id: str, worker: FakeInstance, *numbers: int) -> None:
        bus = self.worker.service.bus
        made = decision(request_id, *numbers, worker=worker.instance_id, incarnation=worker.service.incarnation)
        await bus.publish(bus.subjects.decisions(MODEL), made)

    async def progress(self, request_id: str, phase: str) -> None:
        bus = self.worker.service.bus
        await bus.publish(bus.subjects.progress(MODEL), Progress(request_id=request_id, model=MODEL, phase=phase))


@pytest.fixture
async def cluster(nats_server: NatsServer, namespace: str) -> AsyncIterator[Cluster]:
    where = {"nats": nats_server.url, "namespace": namespace, "health_port": -1}

    def common(name: str) -> CommonSettings:
        return CommonSettings(**where, instance_id=name)  # type: ignore[arg-type]

    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(fake_worker(common("w1"), MODEL))
        mute = await stack.enter_async_context(fake_worker(common("mute"), MODEL, kv_events=False))
        cluster = Cluster(("--nats", nats_server.url, "--namespace", namespace), worker, mute)
        for name in ("i1", "i2"):
            settings = IndexerSettings(**where, instance_id=name)  # type: ignore[arg-type]
            cluster.indexers.append(await stack.enter_async_context(host("indexer", settings, start)))
        yield cluster


async def test_decisions_and_progress_become_predictions_and_events_end_them(cluster: Cluster) -> None:
    await cluster.decide("r1", cluster.worker, 1, 2, 3)
    await cluster.decide("r2", cluster.mute, 1, 2)

    async def look(expected: dict[tuple[str, bool], int]) -> None:
        async def is_so() -> bool:
            # Either replica may answer: both have to have heard of it.
            return [await cluster.ask(1, 2, 3) for _ in range(8)] == [expected] * 8

        await eventually(is_so, what=f"{expected}")  # type: ignore[arg-type]

    await look({("w1", True): 3, ("mute", True): 2})
    await cluster.worker.store(1, 2, 3)
    await cluster.progress("r2", "finished")
    await look({("w1", False): 3})
    for running in cluster.indexers:
        metrics = running.service.metrics
        assert metrics.value("predictions_total", {"why": "confirmed"}) == 1
        assert metrics.value("predictions_total", {"why": "not_computed"}) == 1
        assert metrics.value("predicted_entries") == 0
        assert metrics.value("workers_without_events", {"why": "declared"}) == 1
    asked = sum(r.service.metrics.value("query_matches_total", {"basis": "predicted"}) for r in cluster.indexers)
    assert asked > 0


async def test_an_indexer_describes_itself(cluster: Cluster) -> None:
    await cluster.worker.store(1, 2)
    bus = cluster.worker.service.bus

    async def describe() -> IndexDescription:
        told: IndexDescription = await bus.request(
            bus.subjects.indexer_control("i1"), DescribeIndex(), IndexDescription, timeout_s=5.0
        )
        return told

    async def is_there() -> bool:
        return (await describe()).entries == 2

    await eventually(is_there)  # type: ignore[arg-type]
    told = await describe()
    assert (told.caught_up, told.position, told.blocks, told.instances) == (True, 1, 2, 2)
    assert told.silent == (SilentWorker(instance_id="mute", why="declared"),)


async def test_a_prefix_that_was_asked_for_before_it_was_stored_is_held_by_who_holds_it_now(cluster: Cluster) -> None:
    for _ in range(8):
        await cluster.ask(1, 2, 3, 4)
    await cluster.worker.store(1, 2, 3, 4)
    bus = cluster.worker.service.bus

    async def told() -> list[tuple[int, int]]:
        uses = [
            await bus.request(bus.subjects.indexer_control(name), RankPrefixes(), IndexUse, timeout_s=5.0)
            for name in ("i1", "i2")
        ]
        return [(prefix.depth, prefix.owners) for use in uses for prefix in use.prefixes]

    async def all_held() -> bool:
        return set(await told()) == {(4, 1)}

    await eventually(all_held)  # type: ignore[arg-type]


async def test_the_tools_show_uses_digests_and_what_is_wrong(cluster: Cluster) -> None:
    await cluster.worker.store(*range(1, 9))
    status, told = await cluster.tool("index", "digest", "--feeds", "--wait-s", "10")
    assert (status, told["equal"]) == (0, True)
    assert [digest["entries"] for digest in told["indexers"]] == [8, 8]
    for _ in range(4):
        await cluster.ask(*range(1, 9))
    await cluster.ask(*range(1, 5), counts=False)
    status, used = await cluster.tool("index", "top")
    (model,) = used["models"]
    assert (model["asked"], model["found"], model["stored"]) == (32, 32, 8)
    assert [(p["depth"], p["reads"], p["owners"]) for p in used["prefixes"]] == [(8, 4.0, 1)]
    unknown = await asyncio.to_thread(run_kvbus, "index", "top", "--model", "unheard-of", *cluster.where)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "'unheard-of'" in unknown.stderr
    status, report = await cluster.tool("doctor")
    assert (status, report["healthy"]) == (1, False)
    levels = {finding["about"]: finding["level"] for finding in report["findings"]}
    assert levels.pop("transfer") in ("ok", "note"), "which libraries this machine has"
    assert levels == {
        "bus": "ok",
        "frontend": "problem",
        "router": "problem",
        "indexer": "ok",
        "worker": "ok",
        "kvbm": "note",
        "versions": "ok",
        "model": "ok",
        "events": "ok",
        "i1": "ok",
        "i2": "ok",
        "mute": "note",
    }
