from collections.abc import AsyncIterator

import pytest

from kvbus_testkit.nats import NatsServer
from kvbus_testkit.pairs import Pair, workers_for
from kvbus_worker.app import start
from kvbus_worker.settings import WorkerSettings


@pytest.fixture
async def mocks(nats_server: NatsServer, namespace: str) -> AsyncIterator[Pair]:
    """Pairs of mock workers: p prefills for d. The content of a mock's block follows from its key, so a wrong one is noticed."""
    fields = {"engine": "mock", "mock_speedup": float("inf"), "kv_blocks": 1024, "max_batched_tokens": 64}
    async with workers_for(nats_server, namespace, "mock", WorkerSettings, start, **fields) as pair:
        await pair.join("p", "prefill")
        await pair.join("d", "decode")
        yield pair
