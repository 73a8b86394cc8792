"""Several indexers, some of which do not answer."""

import asyncio
import time
from typing import Any

from kvbus_runtime.bus import RequestContext
from kvbus_testkit.instances import block_keys
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.indexer import IndexQuery, IndexReply, Match
from kvbus_wire.router import Placement, RouteRequest

MODEL = "org/tiny-model"
KEYS = block_keys(1, 2, 3)


async def route(client: Any, request_id: str) -> Placement:
    deadline_ms = int((time.time() + 20) * 1000)
    request = RouteRequest(
        request_id=request_id, model=MODEL, keys=KEYS, prompt_tokens=50, max_tokens=10, deadline_ms=deadline_ms
    )
    placement: Placement = await client.bus.request(
        client.bus.subjects.route(MODEL), request, Placement, timeout_s=20.0
    )
    return placement


async def indexer(cluster: Any, name: str, *, hangs: bool = False) -> Any:
    """It serves as indexers do, and knows that w2 holds the prompt; or it is cut off, which nobody has noticed yet."""

    async def answer(query: IndexQuery, context: RequestContext) -> IndexReply:
        if hangs:
            await asyncio.Event().wait()
        return IndexReply(matches=(Match(instance_id="w2", tier="g1", depth=3),))

    member = await cluster.client("indexer", name)
    bus = member.bus
    await bus.serve(bus.subjects.index_query("*"), [IndexQuery], answer, queue="indexers")
    await bus.serve(bus.subjects.indexer_query(name), [IndexQuery], answer)
    await member.service.register()
    return member


async def start_router(cluster: Any, indexers: int) -> Any:
    running = await cluster.router(index_timeout_s=scaled(1.0), index_failures=2, index_pause_s=60.0)
    for name in ("w1", "w2"):
        await cluster.worker(name, max_num_seqs=64)
    metrics = running.service.metrics
    await eventually(lambda: metrics.value("workers") == 2)
    await eventually(lambda: len(running.service.directory.instances("indexer")) == indexers)
    return metrics


async def test_a_cut_off_indexer_does_not_keep_the_router_from_the_other(cluster: Any) -> None:
    await indexer(cluster, "i1", hangs=True)
    await indexer(cluster, "i2")
    metrics, client = await start_router(cluster, 2), await cluster.client()

    def asked(outcome: str) -> float:
        return metrics.value("index_queries_total", {"outcome": outcome}) or 0.0

    number = 0
    while asked("deadline_exceeded") < 2:
        number += 1
        await route(client, f"before{number}")
    answered = asked("ok")
    # Not all go where the prompt is: those that were placed without an answer may have gone there, too, and are more work.
    for number in range(12):
        await route(client, f"after{number}")
    assert asked("ok") == answered + 12
    assert asked("deadline_exceeded") == 2
    assert not metrics.value("index_queries_total", {"outcome": "paused"})


async def test_a_question_that_nobody_serves_goes_to_the_other_indexer_at_once(cluster: Any) -> None:
    killed = await cluster.client("indexer", "i1")
    await killed.service.register()
    await indexer(cluster, "i2")
    metrics, client = await start_router(cluster, 2), await cluster.client()
    known = [(await route(client, f"r{number}")).cached_tokens for number in range(8)]
    assert known == [48] * 8
    assert metrics.value("index_queries_total", {"outcome": "ok"}) == 8
