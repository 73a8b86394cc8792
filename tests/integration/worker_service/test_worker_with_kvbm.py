"""Two workers and the real kvbm of one host: what one computed the other reads back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus_kvbm.app import start as start_kvbm
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.frontend import Ended, StepFrame
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.worker import Accepted, Generate
from kvbus_worker.app import start as start_worker
from kvbus_worker.settings import WorkerSettings

PROMPT = [i * 7 % 250 for i in range(330)]
FULL_BLOCKS = 20


class Asker:
    """Sends requests and waits for their end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}

    def on_frame(self, frame: StepFrame) -> None:
        for delta in frame.deltas:
            self.output.setdefault(delta.request_id, []).extend(unpack_tokens(delta.tokens))
        for ended in frame.ended:
            self.ended[ended.request_id] = ended

    async def ask(self, worker: str, request_id: str, salt: str = "", model: str = "mock") -> Ended:
        message = Generate(
            request_id=request_id,
            model=model,
            frontend_id=self.service.instance_id,
            tokens=pack_tokens(PROMPT),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=20, ignore_eos=True),
            deadline_ms=int((time.time() + 60) * 1000),
            cache_salt=salt,
        )
        subject = self.service.bus.subjects.generate(worker)
        await self.service.bus.request(subject, message, Accepted, timeout_s=scaled(10.0))
        await eventually(lambda: request_id in self.ended, what=f"the end of {request_id}")
        return self.ended[request_id]

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


async def _start_asker(service: Service, settings: CommonSettings) -> Asker:
    asker = Asker(service)
    await service.bus.subscribe(service.bus.subjects.steps(service.instance_id), (StepFrame,), asker.on_frame)
    return asker


class Host:
    def __init__(self, nats_server: NatsServer, namespace: str, directory: Path, stack: AsyncExitStack) -> None:
        self._common: dict[str, Any] = {
            "nats": nats_server.url,
            "namespace": namespace,
            "host_id": "h",
            "health_port": -1,
            "drain_timeout_s": 1.0,
        }
        self._directory = directory
        self._stack = stack

    async def worker(self, name: str, **fields: Any) -> RunningService[WorkerSettings]:
        settings = WorkerSettings(
            **{
                **self._common,
                "instance_id": name,
                "engine": "mock",
                "mock_speedup": float("inf"),
                "kv_blocks": 64,
                "kvbm_retry_s": 0.1,
                **fields,
            }
        )
        return await self._stack.enter_async_context(host("worker", settings, start_worker))

    @asynccontextmanager
    async def kvbm(self, **fields: Any) -> AsyncIterator[RunningService[KvbmSettings]]:
        settings = KvbmSettings(
            **{
                **self._common,
                "instance_id": "kvbm",
                "arena_dir": str(self._directory),
                "g2_bytes": 1 << 20,
                "onboard_bytes_per_s": 1e9,
                **fields,
            }
        )
        async with host("kvbm", settings, start_kvbm) as running:
            yield running

    async def asker(self) -> Asker:
        running = await self._stack.enter_async_context(host("frontend", CommonSettings(**self._common), _start_asker))
        assert isinstance(running.app, Asker)
        return running.app


@asynccontextmanager
async def one_host(nats_server: NatsServer, namespace: str, directory: Path) -> AsyncIterator[Host]:
    async with AsyncExitStack() as stack:
        yield Host(nats_server, namespace, directory, stack)


def _metric(worker: RunningService[WorkerSettings], name: str, **labels: str) -> float:
    return worker.service.metrics.value(name, labels or None)


async def _attached(*workers: RunningService[WorkerSettings]) -> None:
    for worker in workers:
        await eventually(lambda worker=worker: _metric(worker, "kvbm_attached") == 1, what="an attached kvbm")  # type: ignore[misc]


async def _written_through(worker: RunningService[WorkerSettings], blocks: int) -> None:
    await eventually(
        lambda: _metric(worker, "kvbm_blocks_total", direction="offload") >= blocks, what="blocks written through"
    )


async def test_a_prefix_computed_on_one_worker_is_onboarded_into_another(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with one_host(nats_server, namespace, tmp_path) as on, on.kvbm():
        first, second, asker = await on.worker("w1"), await on.worker("w2"), await on.asker()
        await _attached(first, second)
        cold = await asker.ask("w1", "a")
        assert (cold.usage.cached_tokens, cold.usage.onboarded_tokens) == (0, 0)
        await _written_through(first, FULL_BLOCKS)
        warm = await asker.ask("w2", "b")
        assert warm.usage.onboarded_tokens == warm.usage.cached_tokens == FULL_BLOCKS * 16
        assert asker.output["a"] == asker.output["b"]
        assert _metric(second, "tokens_total", kind="onboarded") == FULL_BLOCKS * 16
        again = await asker.ask("w2", "c")
        assert (again.usage.cached_tokens, again.usage.onboarded_tokens) == (FULL_BLOCKS * 16, 0)


async def test_blocks_evicted_from_g1_come_back_from_g2(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with one_host(nats_server, namespace, tmp_path) as on, on.kvbm():
        worker, asker = await on.worker("w1", kv_blocks=24), await on.asker()
        await _attached(worker)
        await asker.ask("w1", "a")
        await _written_through(worker, FULL_BLOCKS)
        await asker.ask("w1", "push out", salt="another tenant")
        back = await asker.ask("w1", "b")
        assert back.usage.cached_tokens == FULL_BLOCKS * 16
        assert back.usage.onboarded_tokens > 0


async def test_another_tenants_blocks_are_not_onboarded(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with one_host(nats_server, namespace, tmp_path) as on, on.kvbm():
        first, second, asker = await on.worker("w1"), await on.worker("w2"), await on.asker()
        await _attached(first, second)
        await asker.ask("w1", "a", salt="one")
        await _written_through(first, FULL_BLOCKS)
        other = await asker.ask("w2", "b", salt="two")
        assert other.usage.cached_tokens == 0


async def test_requests_go_on_without_kvbm_and_use_it_again_when_it_is_back(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with one_host(nats_server, namespace, tmp_path) as on:
        first, asker = await on.worker("w1"), await on.asker()
        async with on.kvbm():
            await _attached(first)
            await asker.ask("w1", "a")
            await _written_through(first, FULL_BLOCKS)
        second = await on.worker("w2")
        alone = await asker.ask("w2", "b", salt="elsewhere")
        assert (alone.reason, alone.usage.cached_tokens) == ("length", 0)
        async with on.kvbm():
            await _attached(first, second)
            # What G1 held is offered to the new kvbm, so the other worker finds it.
            await _written_through(first, 2 * FULL_BLOCKS)
            found = await asker.ask("w2", "c")
            assert found.usage.onboarded_tokens == FULL_BLOCKS * 16


async def test_a_worker_that_cannot_export_leaves_kvbm_alone(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with one_host(nats_server, namespace, tmp_path) as on, on.kvbm():
        worker, asker = await on.worker("w1", mock_block_bytes=0), await on.asker()
        await asker.ask("w1", "a")
        assert _metric(worker, "kvbm_attached") == 0


async def test_torch_workers_share_blocks_and_say_the_same(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from kvbus_worker.models import tiny

    folder = await asyncio.to_thread(tiny.write, tmp_path / "model", arch="qwen3")
    torch = {"engine": "torch", "model": str(folder), "served_model_name": "tiny", "kv_blocks": 48, "threads": 1}
    async with one_host(nats_server, namespace, tmp_path) as on, on.kvbm(g2_bytes=64 << 20):
        first, second, asker = await on.worker("w1", **torch), await on.worker("w2", **torch), await on.asker()
        await _attached(first, second)
        cold = await asker.ask("w1", "a", model="tiny")
        assert (cold.reason, cold.usage.cached_tokens) == ("length", 0)
        await _written_through(first, FULL_BLOCKS)
        warm = await asker.ask("w2", "b", model="tiny")
        assert warm.usage.onboarded_tokens == warm.usage.cached_tokens == FULL_BLOCKS * 16
        assert asker.output["a"] == asker.output["b"]
        assert len(set(asker.output["a"])) > 1
