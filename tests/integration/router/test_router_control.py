"""Questions to routers, and limits that change while they run, over the real bus."""

import asyncio
import json
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from kvbus_router import app
from kvbus_router.adapters.limits import KEY
from kvbus_router.app import RouterApp
from kvbus_router.settings import RouterSettings
from kvbus_runtime.bus import RequestFailed
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_runtime.service import RunningService
from kvbus_runtime.watched import WatchedValue
from kvbus_testkit.timing import eventually
from kvbus_testkit.up import run_kvbus
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Message, encode
from kvbus_wire.request import AgentHints
from kvbus_wire.router import (
    ExplainPlaced,
    ExplainRoute,
    GetLimits,
    Placement,
    Progress,
    RouteExplanation,
    RouteRequest,
    RouterLimits,
    SetLimits,
    StoredLimits,
    WorkerLimits,
)

MODEL = "org/tiny-model"
FOREVER_MS = 2**53

AppOf = Callable[[RunningService[RouterSettings]], RouterApp]


def ask(request_id: str, **more: Any) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        model=MODEL,
        keys=b"",
        prompt_tokens=100,
        max_tokens=10,
        deadline_ms=FOREVER_MS,
        **more,
    )


async def route(client: Any, request: RouteRequest) -> Placement:
    placement: Placement = await client.bus.request(
        client.bus.subjects.route(MODEL), request, Placement, timeout_s=20.0
    )
    return placement


async def control(client: Any, question: Message, reply: type[Message], router_id: str = "") -> Any:
    subjects = client.bus.subjects
    subject = subjects.router_control(router_id) if router_id else subjects.routers_control
    return await client.bus.request(subject, question, reply, timeout_s=20.0)


async def in_force(client: Any, router_id: str) -> WorkerLimits:
    told: RouterLimits = await control(client, GetLimits(), RouterLimits, router_id)
    return told.in_force


async def know_workers(running: RunningService[RouterSettings], count: int) -> None:
    await eventually(lambda: running.service.metrics.value("workers") == count)


def most_requests(running: RunningService[RouterSettings]) -> float:
    return running.service.metrics.value("limit", {"limit": "max_requests_per_worker"})


async def test_a_placed_request_is_explained_by_the_router_that_placed_it(cluster: Any, app_of: AppOf) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await cluster.worker("w2")
    await know_workers(running, 2)
    placement = await route(client, ask("r", excluded=("w1",)))
    await client.bus.publish(
        client.bus.subjects.progress(MODEL), Progress(request_id="r", model=MODEL, phase="first_token")
    )
    await eventually(lambda: running.service.metrics.value("observed_ttft_seconds_count") == 1)
    told: RouteExplanation = await control(client, ExplainPlaced(request_id="r"), RouteExplanation, "router-1")
    assert (told.worker_id, placement.worker_id) == ("w2", "w2")
    assert told.ttft_s is not None
    assert [(terms.worker_id, terms.verdict) for terms in told.workers] == [("w2", ""), ("w1", "excluded")]
    with pytest.raises(RequestFailed) as refused:
        await control(client, ExplainPlaced(request_id="never"), RouteExplanation, "router-1")
    assert refused.value.code is ErrorCode.GONE


async def test_a_question_is_answered_and_places_nothing(cluster: Any, app_of: AppOf) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await know_workers(running, 1)
    told: RouteExplanation = await control(client, ExplainRoute(request=ask("r")), RouteExplanation)
    assert [terms.uncached_tokens for terms in told.workers] == [100]
    assert app_of(running).dispatcher.state.reservations == 0
    for param, nonsense in (
        ("preferred_taints", ask("r", preferred_taints={"t": -1.0})),
        ("preferred_taints", ask("r", preferred_taints={"t": 1e308})),
        ("hints", ask("r", hints=AgentHints(latency_sensitivity=nan))),
    ):
        with pytest.raises(RequestFailed) as refused:
            await control(client, ExplainRoute(request=nonsense), RouteExplanation)
        assert (refused.value.code, refused.value.reply.param) == (ErrorCode.INVALID_REQUEST, param)


async def test_all_routers_agree_on_limits_that_change_and_those_that_start_later_too(cluster: Any) -> None:
    routers = [await cluster.router("router-1"), await cluster.router("router-2", busy_waiting_tokens=777)]
    client = await cluster.client()
    change = SetLimits(limits=WorkerLimits(max_requests_per_worker=3), cordon=("w9",))
    told: RouterLimits = await control(client, change, RouterLimits)
    assert told.in_force.max_requests_per_worker == 3
    await eventually(lambda: all(most_requests(running) == 3 for running in routers))
    routers.append(await cluster.router("router-3"))
    await eventually(lambda: most_requests(routers[-1]) == 3)
    limits = [await in_force(client, f"router-{number}") for number in (1, 2, 3)]
    assert [limit.cordoned for limit in limits] == [("w9",)] * 3
    assert [limit.busy_waiting_tokens for limit in limits] == [0, 777, 0], "what was not changed is each one's setting"


async def test_changes_at_the_same_time_all_count(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    changes = [SetLimits(cordon=(f"w{number}",)) for number in range(4)]
    await asyncio.gather(*(control(client, change, RouterLimits) for change in changes))
    limits = await in_force(client, "router-1")
    assert limits.cordoned == ("w0", "w1", "w2", "w3")
    metrics = running.service.metrics
    assert metrics.value("limit_changes_total", {"outcome": "ok"}) == 4
    assert metrics.value("cordoned_workers") == 4


async def test_a_limit_in_force_holds_and_its_end_frees_those_who_wait(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await know_workers(running, 1)
    await control(client, SetLimits(limits=WorkerLimits(max_requests_per_worker=1)), RouterLimits)
    assert most_requests(running) == 1
    await route(client, ask("first"))
    waiting = asyncio.create_task(route(client, ask("second")))
    await eventually(lambda: running.service.metrics.value("waiting_requests") == 1)
    await control(client, SetLimits(reset=("max_requests_per_worker",)), RouterLimits)
    assert (await waiting).worker_id == "w1"


async def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    with pytest.raises(RequestFailed) as refused:
        await control(client, SetLimits(limits=WorkerLimits(busy_used_blocks_share=2.0)), RouterLimits)
    assert (refused.value.code, refused.value.reply.param) == (ErrorCode.INVALID_REQUEST, "busy_used_blocks_share")
    assert running.service.metrics.value("limits_revision") == 0
    assert running.service.metrics.value("limit_changes_total", {"outcome": "invalid_request"}) == 1


async def test_stored_limits_that_make_no_sense_count_as_none(cluster: Any) -> None:
    running, client = await cluster.router(), await cluster.client()
    stored = WatchedValue(client.bus, client.bus.subjects.settings_bucket, KEY, lambda _: None)
    await stored.start()
    await stored.change(lambda _: encode(StoredLimits(limits=WorkerLimits(worker_limit_factor=inf))))
    await eventually(lambda: running.service.metrics.value("limits_revision") == 1)
    assert (await in_force(client, "router-1")).worker_limit_factor == RouterSettings().worker_limit_factor
    await stored.stop()


async def test_a_router_that_cannot_follow_the_limits_places_all_the_same(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(_value: WatchedValue) -> None:
        raise JetStreamRefused(500, 10047, "insufficient storage resources available")

    monkeypatch.setattr(WatchedValue, "_ensure", no_room)
    monkeypatch.setattr(app, "LIMITS_WAIT_S", 0.05)
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await know_workers(running, 1)
    assert (await route(client, ask("r"))).worker_id == "w1"


async def test_the_command_shows_and_changes_limits_and_explains(cluster: Any, namespace: str) -> None:
    running, client = await cluster.router(), await cluster.client()
    await cluster.worker("w1")
    await know_workers(running, 1)
    await route(client, ask("r"))
    where = ("--nats", client.service.settings.nats, "--namespace", namespace)

    async def kvbus(*arguments: str) -> Any:
        return await asyncio.to_thread(run_kvbus, *arguments, *where)

    changed = await kvbus("router", "limits", "--busy-waiting-tokens", "5000", "--cordon", "w7,w8")
    assert changed.returncode == 0, changed.stderr
    assert "5000 *" in changed.stdout
    assert "there is no worker w7 now" in changed.stderr
    shown = await kvbus("router", "limits", "--json")
    (limits,) = json.loads(shown.stdout)
    assert (limits["router_id"], limits["in_force"]["cordoned"]) == ("router-1", ["w7", "w8"])
    explained = await kvbus("router", "explain", "--request-id", "r")
    assert explained.returncode == 0, explained.stderr
    assert "r went to w1" in explained.stdout
    unknown = await kvbus("router", "explain", "--request-id", "never")
    assert unknown.returncode == 1
    assert "router-1: " in unknown.stderr
