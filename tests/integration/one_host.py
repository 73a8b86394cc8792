"""The kvbm and the workers of one host, in the test's own loop, and who asks them."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbus_kvbm.app import KvbmApp
from kvbus_kvbm.app import start as start_kvbm
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import RunningService, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import Asker, asking
from kvbus_testkit.kvbm import STREAM_BYTES
from kvbus_testkit.timing import eventually
from kvbus_worker.app import start as start_worker
from kvbus_worker.settings import WorkerSettings

Worker = RunningService[WorkerSettings]
Kvbm = RunningService[KvbmSettings]


class OneHost:
    """All live until ``stack`` ends, or the one that they are given. ``model``: what is asked for;
    ``worker``: settings of all workers."""

    def __init__(
        self,
        stack: AsyncExitStack,
        nats_url: str,
        namespace: str,
        arena_dir: Path,
        *,
        model: str = "mock",
        worker: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.stack = stack
        self.common: dict[str, Any] = {
            "nats": nats_url,
            "namespace": namespace,
            "host_id": "host-1",
            "health_port": -1,
            "drain_timeout_s": 1.0,
            "kv_stream_max_bytes": STREAM_BYTES,
        }
        self._arena_dir = str(arena_dir)
        self._model = model
        self._worker = worker

    async def kvbm(self, stack: AsyncExitStack | None = None, **fields: Any) -> Kvbm:
        values = {"instance_id": "kvbm-1", "g2_bytes": 1 << 20, "onboard_bytes_per_s": 1e9, **fields}
        settings = KvbmSettings(**self.common, arena_dir=self._arena_dir, **values)
        return await (stack or self.stack).enter_async_context(host("kvbm", settings, start_kvbm))

    async def worker(self, instance_id: str = "w", *, attached: bool = True, **fields: Any) -> Worker:
        """``attached``: to the kvbm, which is there already."""
        values = {"engine": "mock", "mock_speedup": float("inf"), "kv_blocks": 64, "kvbm_retry_s": 0.1}
        settings = WorkerSettings(**self.common, **{"instance_id": instance_id, **values, **self._worker, **fields})
        running = await self.stack.enter_async_context(host("worker", settings, start_worker))
        if attached:
            await is_attached(running)
        return running

    async def asker(self) -> Asker:
        return await self.stack.enter_async_context(asking(CommonSettings(**self.common), self._model))


def metric(service: RunningService[Any], name: str, **labels: str) -> float:
    return service.service.metrics.value(name, labels or None)


def app_of(kvbm: Kvbm) -> KvbmApp:
    assert isinstance(kvbm.app, KvbmApp)
    return kvbm.app


async def is_attached(*workers: Worker) -> None:
    for worker in workers:
        await eventually(lambda worker=worker: metric(worker, "kvbm_attached") == 1, what="an attached kvbm")  # type: ignore[misc]


async def written_through(worker: Worker, blocks: int) -> None:
    """Return when so many blocks of a worker have gone to kvbm, in all."""
    await eventually(
        lambda: metric(worker, "kvbm_blocks_total", direction="offload") >= blocks, what="blocks written through"
    )
