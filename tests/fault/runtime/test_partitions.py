"""One participant loses the bus while the others keep it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvbus_runtime.bus import RequestContext, RequestFailed
from kvbus_runtime.service import Service
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.proxy import TcpProxy
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Message
from kvbus_wire.worker import Cancel, Done

WAIT_S = scaled(30)


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(nats_server.url) as between:
        yield between


async def serve(worker: Service) -> str:
    async def done(message: Message, context: RequestContext) -> Message:
        return Done()

    subject = worker.bus.subjects.control(worker.instance_id)
    await worker.bus.serve(subject, [Cancel], done)
    return subject


async def ask(router: Service, subject: str, timeout_s: float = WAIT_S) -> object:
    return await router.bus.request(subject, Cancel(request_id="r", reason="x"), Done, timeout_s=timeout_s)


async def test_a_worker_cut_off_is_gone_after_its_lease_and_back_after_the_cut(
    nats_server: NatsServer, proxy: TcpProxy, namespace: str
) -> None:
    async with (
        running_service(nats_server.url, namespace, name="router", lease_ttl_s=2) as router,
        running_service(proxy.url, namespace, name="worker", lease_ttl_s=2) as worker,
    ):
        subject = await serve(worker)
        await eventually(lambda: router.directory.get(worker.instance_id))
        changes: list[str] = []
        router.directory.on_change(lambda record, change: changes.append(f"{record.service} {change}"))
        await eventually(lambda: "worker joined" in changes)
        changes.clear()
        await proxy.cut()
        await eventually(lambda: changes == ["worker left"], timeout_s=30)
        with pytest.raises(RequestFailed) as failure:
            await ask(router, subject)
        assert failure.value.code is ErrorCode.UNAVAILABLE
        # The one that is cut off keeps what it knows.
        assert worker.directory.get(router.instance_id) is not None
        assert not worker.health.ready
        await proxy.heal()
        await eventually(lambda: changes == ["worker left", "worker joined"], timeout_s=30)
        assert await ask(router, subject) == Done()
        await eventually(lambda: worker.health.ready)
        record = router.directory.get(worker.instance_id)
        assert record is not None
        assert record.incarnation == worker.incarnation


async def test_a_half_open_connection_is_noticed_and_replaced(
    nats_server: NatsServer, proxy: TcpProxy, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_runtime.link.PING_INTERVAL_S", 0.2)
    async with (
        running_service(nats_server.url, namespace, name="worker") as worker,
        running_service(proxy.url, namespace, name="router") as router,
    ):
        subject = await serve(worker)
        assert await ask(router, subject) == Done()
        proxy.stall()
        waiting = asyncio.create_task(ask(router, subject))
        await eventually(lambda: not router.bus.is_connected, timeout_s=30)
        await proxy.cut()
        await proxy.heal()
        assert await waiting == Done()


async def test_a_connection_that_breaks_again_and_again_loses_no_request(
    nats_server: NatsServer, proxy: TcpProxy, namespace: str
) -> None:
    async with (
        running_service(nats_server.url, namespace, name="worker") as worker,
        running_service(proxy.url, namespace, name="router") as router,
    ):
        subject = await serve(worker)
        for _ in range(10):
            waiting = [asyncio.create_task(ask(router, subject)) for _ in range(20)]
            await asyncio.sleep(0)
            await proxy.cut()
            await proxy.heal()
            assert await asyncio.gather(*waiting) == [Done()] * 20
