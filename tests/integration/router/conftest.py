"""A router with instances that a test controls."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvbus_router.app import RouterApp, start
from kvbus_router.settings import RouterSettings
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.instances import FakeInstance, fake_kvbm, fake_worker
from kvbus_testkit.nats import NatsServer

MODEL = "org/tiny-model"


class Client:
    """A participant that only asks, like a frontend."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.bus = service.bus

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Cluster:
    """Services of one test, all in this process and on the real bus."""

    def __init__(self, url: str, namespace: str) -> None:
        self._base: dict[str, Any] = {"nats": url, "namespace": namespace, "health_port": -1, "lease_ttl_s": 2}
        self.stack = AsyncExitStack()

    def settings(self, name: str) -> CommonSettings:
        return CommonSettings(**self._base, instance_id=name)

    async def router(self, name: str = "router-1", **fields: Any) -> RunningService[RouterSettings]:
        settings = RouterSettings(**self._base, instance_id=name, **fields)
        return await self.stack.enter_async_context(host("router", settings, start))

    async def worker(self, name: str, **record: Any) -> FakeInstance:
        return await self.stack.enter_async_context(fake_worker(self.settings(name), MODEL, **record))

    async def kvbm(self, name: str) -> FakeInstance:
        return await self.stack.enter_async_context(fake_kvbm(self.settings(name), MODEL))

    async def client(self, service: str = "frontend", name: str = "client") -> Client:
        """``service``: as what it is hosted; it is registered when the test says so."""

        async def start_client(service: Service, _settings: CommonSettings) -> Client:
            return Client(service)

        running = await self.stack.enter_async_context(host(service, self.settings(name), start_client))
        assert isinstance(running.app, Client)
        return running.app


@pytest.fixture
async def cluster(nats_server: NatsServer, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(nats_server.url, namespace)
    async with cluster.stack:
        yield cluster


@pytest.fixture
def app_of() -> Any:
    def get(running: RunningService[RouterSettings]) -> RouterApp:
        assert isinstance(running.app, RouterApp)
        return running.app

    return get
