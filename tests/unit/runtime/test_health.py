import asyncio
from typing import Any

import aiohttp

from kvbus_runtime.health import Health, HealthServer
from kvbus_runtime.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_ready_when_every_named_check_is_ok() -> None:
    metrics = Metrics("router")
    health = Health(metrics)
    assert not health.ready, "nothing was checked yet"
    health.set("bus", True)
    assert health.ready
    health.set("workers", False, "none known")
    assert not health.ready
    assert metrics.value("ready") == 0
    health.set("workers", True)
    assert health.ready
    assert health.is_ok("workers")
    assert not health.is_ok("other")
    health.set("workers", False)
    health.remove("workers")
    assert health.ready
    assert metrics.value("ready") == 1


def test_the_age_of_a_check_counts_from_its_last_change() -> None:
    clock = Clock()
    health = Health(Metrics("router"), clock)
    health.set("bus", True, "one")
    clock.now += 5
    health.set("bus", True, "two")
    assert health.report() == {"ready": True, "checks": {"bus": {"ok": True, "detail": "two", "age_s": 5.0}}}
    health.set("bus", False)
    assert health.report() == {"ready": False, "checks": {"bus": {"ok": False, "detail": "", "age_s": 0.0}}}


async def test_waiting_for_readiness_ends_when_it_comes() -> None:
    health = Health(Metrics("router"))
    waiting = asyncio.create_task(health.wait_ready())
    health.set("bus", False)
    await asyncio.sleep(0)
    assert not waiting.done()
    health.set("bus", True)
    await waiting


async def test_the_health_server_answers_on_all_three_pages() -> None:
    metrics = Metrics("router")
    metrics.counter("things", "things done", ("kind",)).labels("odd").inc(3)
    health = Health(metrics)
    health.set("bus", False, "connecting")
    server = HealthServer(health, "127.0.0.1", 0)
    await server.start()
    try:
        async with aiohttp.ClientSession() as client:

            async def get(path: str) -> tuple[int, Any]:
                async with client.get(server.url + path) as response:
                    body = await (response.json() if path != "/metrics" else response.text())
                    return response.status, body

            assert await get("/livez") == (200, {"alive": True})
            status, report = await get("/readyz")
            assert status == 503
            assert report["checks"]["bus"]["detail"] == "connecting"
            health.set("bus", True)
            assert (await get("/readyz"))[0] == 200
            status, text = await get("/metrics")
            assert status == 200
            assert 'kvbus_router_things_total{kind="odd"} 3.0' in text
            assert "process_resident_memory_bytes" in text
    finally:
        await server.stop()
        await server.stop()


def test_asking_again_for_a_metric_returns_the_same_one() -> None:
    metrics = Metrics("worker")
    metrics.counter("a", "help").inc()
    metrics.counter("a", "help").inc()
    metrics.gauge("b", "help").set(4)
    metrics.histogram("c_seconds", "help", ("kind",)).labels("x").observe(0.2)
    assert metrics.value("a_total") == 2
    assert metrics.value("b") == 4
    assert metrics.value("c_seconds_count", {"kind": "x"}) == 1
    assert metrics.value("absent") == 0


def test_two_services_in_one_process_do_not_share_metrics() -> None:
    one, other = Metrics("worker"), Metrics("worker")
    one.counter("a", "help").inc()
    assert other.value("a_total") == 0
