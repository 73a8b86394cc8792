"""A file of policy classes at a running router: in force from the start, and again when it has changed."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvbus_runtime.bus import RequestFailed
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.router import Placement, RouteRequest

MODEL = "org/tiny-model"
ONE_AT_A_TIME = '[[class]]\nname = "batch"\ntenants = ["batch"]\nmax_running = 1\nmax_waiting_per_tenant = 1\n'


async def route(client: Any, request_id: str) -> Placement:
    request = RouteRequest(
        request_id=request_id,
        model=MODEL,
        keys=b"",
        prompt_tokens=100,
        max_tokens=10,
        deadline_ms=int((time.time() + 20) * 1000),
        tenant="batch",
    )
    bus = client.bus
    placement: Placement = await bus.request(bus.subjects.route(MODEL), request, Placement, timeout_s=20.0)
    return placement


def written(file: Path, text: str) -> None:
    file.write_text(text)


async def test_limits_of_a_class_hold_and_follow_the_file(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "classes"
    await asyncio.to_thread(written, file, ONE_AT_A_TIME)
    running = await cluster.router(policy_classes=str(file), policy_classes_poll_s=0.05)
    client, metrics = await cluster.client(), running.service.metrics
    await cluster.worker("w1")
    await eventually(lambda: metrics.value("workers") == 1)
    await route(client, "first")
    waiting = asyncio.create_task(route(client, "second"))
    in_class = {"policy_class": "batch"}
    await eventually(lambda: metrics.value("class_waiting_requests", in_class) == 1)
    assert metrics.value("class_placed_requests", in_class) == 1
    with pytest.raises(RequestFailed) as refused:
        await route(client, "third")
    assert refused.value.code is ErrorCode.RATE_LIMITED
    assert refused.value.reply.retry_after_s is not None

    await asyncio.to_thread(written, file, "[[class]]\nname = 1\n")
    await eventually(lambda: metrics.value("policy_class_reloads_total", {"outcome": "refused"}) == 1)
    assert not waiting.done()
    await asyncio.to_thread(written, file, ONE_AT_A_TIME.replace("max_running = 1", "max_running = 2"))
    assert (await waiting).worker_id == "w1"
