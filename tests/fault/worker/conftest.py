"""What the tests of a worker's side of kvbm share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus_runtime.service import host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from tests.fault.worker.kvbm_client import Client, FakeKvbm, kvbm_host, start_client


@pytest.fixture
async def settings(nats_server: NatsServer, namespace: str) -> CommonSettings:
    return CommonSettings(nats=nats_server.url, namespace=namespace, host_id="h", health_port=-1, drain_timeout_s=1.0)


@pytest.fixture
async def pair(
    request: pytest.FixtureRequest, settings: CommonSettings, tmp_path: Path
) -> AsyncIterator[tuple[Client, FakeKvbm]]:
    async with (
        kvbm_host(settings, tmp_path, **getattr(request, "param", {})) as kvbm,
        host("worker", settings, start_client) as worker,
    ):
        client, fake = worker.app, kvbm.app
        assert isinstance(client, Client)
        assert isinstance(fake, FakeKvbm)
        yield client, fake
