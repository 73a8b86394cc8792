import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvbus_router.app import RouterApp
from kvbus_router.settings import RouterSettings
from kvbus_runtime.bus import RequestContext, RequestFailed
from kvbus_runtime.discovery import Change
from kvbus_runtime.service import RunningService
from kvbus_testkit.instances import block_keys
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import IndexQuery, IndexReply, Match
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Placement, Progress, RouteRequest

MODEL = "org/tiny-model"

AppOf = Callable[[RunningService[RouterSettings]], RouterApp]


def ask(
    request_id: str, *, keys: bytes = b"", prompt_tokens: int = 100, patience_s: float = 20.0, **more: Any
) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        model=MODEL,
        keys=keys,
        prompt_tokens=prompt_tokens,
        max_tokens=10,
        deadline_ms=int((time.time() + patience_s) * 1000),
        **more,
    )


async def route(client: Any, request: RouteRequest) -> Placement:
    bus = client.bus
    placement: Placement = await bus.request(bus.subjects.route(MODEL), request, Placement, timeout_s=20.0)
    return placement


async def refusal(client: Any, request: RouteRequest) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        await route(client, request)
    return refused.value


async def progress(client: Any, request_id: str, phase: str) -> None:
    message = Progress(request_id=request_id, model=MODEL, phase=phase)
    await client.bus.publish(client.bus.subjects.progress(MODEL), message)


@asynccontextmanager
async def index_of(client: Any, *matches: Match) -> AsyncIterator[list[IndexQuery]]:
    """An indexer that always gives the same answer."""
    asked: list[IndexQuery] = []

    async def answer(query: IndexQuery, context: RequestContext) -> IndexReply:
        asked.append(query)
        return IndexReply(matches=matches)

    served = await client.bus.serve(client.bus.subjects.index_query("*"), [IndexQuery], answer)
    yield asked
    await served.stop()


async def workers_known(running: RunningService[RouterSettings], count: int) -> None:
    await eventually(lambda: running.service.metrics.value("workers") == count)


async def reservations_are(app: RouterApp, count: int) -> None:
    await eventually(lambda: app.dispatcher.state.reservations == count)
    app.dispatcher.check_integrity()


async def test_a_request_goes_where_its_prefix_is(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await cluster.worker("w2")
    await workers_known(running, 2)
    match = Match(instance_id="w2", tier="g1", depth=4)
    async with index_of(client, match) as asked:
        placement = await route(client, ask("r", keys=block_keys(1, 2, 3, 4, 5), prompt_tokens=85, explain=True))
    assert (placement.worker_id, placement.cached_tokens, placement.policy) == ("w2", 64, "kv")
    assert [query.keys for query in asked] == [block_keys(1, 2, 3, 4, 5)]
    assert placement.explanation is not None
    assert [terms.worker_id for terms in placement.explanation.workers] == ["w2", "w1"]


async def test_what_the_hosts_kvbm_holds_counts_as_onboarding(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await cluster.kvbm("k1")
    await workers_known(running, 1)
    async with index_of(client, Match(instance_id="k1", tier="g2", depth=5)):
        placement = await route(client, ask("r", keys=block_keys(1, 2, 3, 4, 5), prompt_tokens=85))
    assert (placement.cached_tokens, placement.onboard_tokens) == (0, 80)


async def test_without_an_indexer_requests_are_placed_all_the_same(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    placement = await route(client, ask("r", keys=block_keys(1, 2)))
    assert (placement.worker_id, placement.cached_tokens) == ("w1", 0)
    assert running.service.metrics.value("index_queries_total", {"outcome": "unavailable"}) == 1
    assert running.service.health.ready, "an indexer that is away is no reason to be unready"
    checks = running.service.health.report()["checks"]
    assert "degraded" in str(checks)


async def test_an_indexer_that_hangs_is_left_alone_for_a_moment(cluster: Any) -> None:
    running = await cluster.router(index_timeout_s=0.02, index_failures=2, index_pause_s=60.0)
    client = await cluster.client()
    await cluster.worker("w1", max_num_seqs=16)
    await workers_known(running, 1)
    asked = asyncio.Event()

    async def hang(query: IndexQuery, context: RequestContext) -> IndexReply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    served = await client.bus.serve(client.bus.subjects.index_query("*"), [IndexQuery], hang)
    for number in range(4):
        assert (await route(client, ask(f"r{number}", keys=block_keys(1)))).worker_id == "w1"
    metrics = running.service.metrics
    assert asked.is_set()
    assert metrics.value("index_queries_total", {"outcome": "deadline_exceeded"}) == 2
    assert metrics.value("index_queries_total", {"outcome": "paused"}) == 2
    await served.stop()


async def test_a_router_is_ready_when_it_knows_a_worker(cluster: Any) -> None:
    running = await cluster.router()
    assert not running.service.health.ready
    await cluster.worker("w1")
    await eventually(lambda: running.service.health.ready)


async def test_load_reports_steer_requests_away(cluster: Any, app_of: AppOf) -> None:
    running, client = await cluster.router(), await cluster.client()
    w1, _ = await cluster.worker("w1"), await cluster.worker("w2")
    await workers_known(running, 2)
    await w1.report_load(running=3, waiting_tokens=4000)
    worker = app_of(running).dispatcher.state.worker("w1")
    assert worker is not None
    await eventually(lambda: worker.totals.waiting_tokens == 4000)
    assert (await route(client, ask("r"))).worker_id == "w2"


async def test_a_full_cluster_queues_until_somebody_finishes(cluster: Any) -> None:
    running, client = await cluster.router(max_requests_per_worker=1), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    await route(client, ask("first"))
    waiting = asyncio.create_task(route(client, ask("second")))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    assert not waiting.done()
    await progress(client, "first", "first_token")
    await progress(client, "first", "finished")
    placement = await waiting
    assert placement.worker_id == "w1"
    assert placement.queued_s > 0
    metrics = running.service.metrics
    assert metrics.value("placements_total", {"policy": "kv", "waited": "yes"}) == 1
    assert metrics.value("reservations_ended_total", {"reason": "finished"}) == 1


async def test_a_full_queue_and_a_deadline_are_typed_refusals(cluster: Any) -> None:
    running, client = await cluster.router(max_requests_per_worker=1, max_queued=1), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    await route(client, ask("first"))
    waiting = asyncio.create_task(refusal(client, ask("second", patience_s=1.0)))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    overloaded = await refusal(client, ask("third"))
    assert overloaded.code is ErrorCode.OVERLOADED
    assert overloaded.reply.retry_after_s is not None
    assert (await waiting).code is ErrorCode.DEADLINE_EXCEEDED
    assert running.service.metrics.value("waiting_requests") == 0


async def test_without_workers_a_request_waits_a_moment_and_is_refused(cluster: Any) -> None:
    running, client = await cluster.router(worker_wait_s=0.1), await cluster.client()
    refused = await refusal(client, ask("r"))
    assert (refused.code, refused.retryable) == (ErrorCode.NO_WORKERS, True)
    refused = await refusal(client, ask("s", pinned="w9"))
    assert (refused.code, refused.retryable) == (ErrorCode.NO_WORKERS, False)
    assert running.service.metrics.value("refusals_total", {"code": "no_workers"}) == 2


async def test_a_worker_that_appears_in_time_gets_the_waiting_request(cluster: Any) -> None:
    running, client = await cluster.router(worker_wait_s=60.0), await cluster.client()
    waiting = asyncio.create_task(route(client, ask("r")))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    await cluster.worker("w1")
    assert (await waiting).worker_id == "w1"


async def test_nonsense_is_refused_with_the_field(cluster: Any) -> None:
    await cluster.router()
    client = await cluster.client()
    for request, field in [
        (ask("r", keys=b"short"), "keys"),
        (ask("r", prompt_tokens=0), "prompt_tokens"),
        (ask(""), "request_id"),
        (msgspec.structs.replace(ask("r"), model=""), "model"),
    ]:
        refused = await refusal(client, request)
        assert (refused.code, refused.reply.param) == (ErrorCode.INVALID_REQUEST, field)


async def test_a_replica_knows_of_placements_and_their_prefixes(cluster: Any, app_of: AppOf) -> None:
    first, second = await cluster.router("router-1"), await cluster.router("router-2")
    client = await cluster.client()
    await cluster.worker("w1")
    await cluster.worker("w2")
    for running in (first, second):
        await workers_known(running, 2)
    keys = block_keys(*range(1, 7))
    placement = await route(client, ask("lead", keys=keys))
    for running in (first, second):
        state = app_of(running).dispatcher.state
        await reservations_are(app_of(running), 1)
        assert state.inflight.depths(keys, 0.0) == {placement.worker_id: 6}
    # Whichever of the two is asked, the fan-out finds the worker that computes the prefix.
    others = [await route(client, ask(f"sub{number}", keys=keys)) for number in range(3)]
    assert {other.worker_id for other in others} == {placement.worker_id}
    for number in ("lead", "sub0", "sub1", "sub2"):
        await progress(client, number, "finished")
    for running in (first, second):
        await reservations_are(app_of(running), 0)


async def test_asking_again_moves_the_reservation_at_every_replica(cluster: Any, app_of: AppOf) -> None:
    first, second = await cluster.router("router-1"), await cluster.router("router-2")
    client = await cluster.client()
    await cluster.worker("w1")
    await cluster.worker("w2")
    for running in (first, second):
        await workers_known(running, 2)
    lost = await route(client, ask("r"))
    placement = await route(client, ask("r", excluded=(lost.worker_id,)))
    assert placement.worker_id != lost.worker_id
    for running in (first, second):
        state = app_of(running).dispatcher.state

        def moved(state: Any = state) -> bool:
            reservation = state.reservation("r")
            return reservation is not None and reservation.worker_id == placement.worker_id

        await eventually(moved)
        assert state.reservations == 1


async def test_a_client_that_goes_away_frees_its_place_in_the_queue(cluster: Any) -> None:
    running, client = await cluster.router(max_requests_per_worker=1), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    await route(client, ask("first"))
    waiting = asyncio.create_task(refusal(client, ask("second")))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    await progress(client, "second", "finished")
    assert (await waiting).code is ErrorCode.CANCELLED
    assert running.service.metrics.value("waiting_requests") == 0


async def test_a_requester_that_stops_waiting_frees_its_place_too(cluster: Any) -> None:
    running, client = await cluster.router(max_requests_per_worker=1), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    await route(client, ask("first"))
    bus = client.bus
    with pytest.raises(RequestFailed):
        await bus.request(bus.subjects.route(MODEL), ask("second"), Placement, timeout_s=0.2)
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 0)


async def test_a_router_that_stops_sends_those_who_wait_to_another(cluster: Any) -> None:
    running, client = await cluster.router(max_requests_per_worker=1), await cluster.client()
    await cluster.worker("w1")
    await workers_known(running, 1)
    await route(client, ask("first"))
    waiting = asyncio.create_task(refusal(client, ask("second")))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    running.service.stop("test")
    refused = await waiting
    assert (refused.code, refused.retryable) == (ErrorCode.DRAINING, True)


async def test_a_router_that_starts_takes_over_what_is_under_way_before_it_serves(cluster: Any, app_of: AppOf) -> None:
    first, client = await cluster.router("router-1"), await cluster.client()
    w1, w2 = await cluster.worker("w1"), await cluster.worker("w2")
    await workers_known(first, 2)
    reports = asyncio.TaskGroup()

    def greet(record: InstanceRecord, change: Change) -> None:
        if record.instance_id == "router-2" and change == "joined":
            reports.create_task(w1.report_load(running=1, waiting_tokens=4000, request_ids=["under-way"]))
            reports.create_task(w2.report_load())

    async with reports:
        w1.service.directory.on_change(greet)
        second = await cluster.router("router-2", load_wait_s=20.0)
    state = app_of(second).dispatcher.state
    assert not state.unheard()
    assert state.reservation("under-way") is not None
    assert second.service.metrics.value("load_corrections_total", {"kind": "adopted"}) == 1
    first.service.stop("test")
    await eventually(lambda: client.service.directory.get("router-1") is None)
    assert (await route(client, ask("r"))).worker_id == "w2"
    await progress(client, "under-way", "finished")
    await reservations_are(app_of(second), 1)
    metrics = second.service.metrics
    assert metrics.value("load_reports_total", {"outcome": "applied"}) == 2
    assert metrics.value("oldest_load_report_seconds") > 0


async def test_a_router_does_not_wait_long_for_workers_that_are_silent(cluster: Any) -> None:
    client = await cluster.client()
    await cluster.worker("w1")
    await cluster.router(load_wait_s=0.05)
    assert (await route(client, ask("r"))).worker_id == "w1"
