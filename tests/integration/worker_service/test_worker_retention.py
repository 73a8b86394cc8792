"""What requests say of their tokens, and what others ask of a worker's blocks, over the bus."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_kvbm.app import start as start_kvbm
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import StepFrame, Usage
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks
from kvbus_wire.message import Message
from kvbus_wire.packing import pack_keys, pack_tokens
from kvbus_wire.request import Retention, Sampling, Stopping
from kvbus_wire.worker import Accepted, Generate, NeedTokens, Prefetch, Prefetched
from kvbus_worker.app import WorkerApp
from kvbus_worker.app import start as start_worker
from kvbus_worker.settings import WorkerSettings

PROMPT = [i * 7 % 250 for i in range(330)]
WHOLE_BLOCKS = 20


class Asker:
    """A frontend that sends requests and waits for their usage."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.usage: dict[str, Usage] = {}

    def on_frame(self, frame: StepFrame) -> None:
        self.usage.update({ended.request_id: ended.usage for ended in frame.ended})

    async def ask(self, request_id: str, *retention: Retention, salt: str = "", tenant: str = "") -> Usage:
        message = Generate(
            request_id=request_id,
            model="mock",
            frontend_id=self.service.instance_id,
            tokens=pack_tokens(PROMPT),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=2, ignore_eos=True),
            deadline_ms=_in(60.0),
            cache_salt=salt,
            retention=retention,
            tenant=tenant,
        )
        await self.generate(message, Accepted)
        await eventually(lambda: request_id in self.usage, what=f"the end of {request_id}")
        return self.usage[request_id]

    async def prefetch(self, *, reply: type[Message] = Prefetched, **fields: Any) -> Any:
        values: dict[str, Any] = {"request_id": "p", "model": "mock", "tokens": pack_tokens(PROMPT)}
        values |= {"deadline_ms": _in(10.0), **fields}
        return await self.generate(Prefetch(**values), reply)

    async def drop(self, keys: list[bytes], model: str = "mock") -> dict[str, int]:
        subject = self.service.bus.subjects.control("w")
        message = DropBlocks(model=model, keys=pack_keys(keys))
        dropped: DroppedBlocks = await self.service.bus.request(subject, message, DroppedBlocks, timeout_s=scaled(10.0))
        return dropped.blocks

    async def generate(self, message: Message, reply: type[Message]) -> Any:
        return await self.service.bus.request(
            self.service.bus.subjects.generate("w"), message, reply, timeout_s=scaled(20.0)
        )

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


def _in(seconds: float) -> int:
    return int((time.time() + scaled(seconds)) * 1000)


async def _start_asker(service: Service, settings: CommonSettings) -> Asker:
    asker = Asker(service)
    await service.bus.subscribe(service.bus.subjects.steps(service.instance_id), (StepFrame,), asker.on_frame)
    return asker


class Place:
    """One worker, ``w``, and who asks it; a kvbm when a test wants one."""

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

    async def worker(self, **fields: Any) -> RunningService[WorkerSettings]:
        values = {"instance_id": "w", "engine": "mock", "mock_speedup": float("inf"), "kv_blocks": 64, **fields}
        return await self._stack.enter_async_context(
            host("worker", WorkerSettings(**self._common, **values), start_worker)
        )

    async def kvbm(self, **fields: Any) -> None:
        values: dict[str, Any] = {"instance_id": "kvbm", "arena_dir": str(self._directory), "g2_bytes": 1 << 20}
        settings = KvbmSettings(**self._common, **{**values, "onboard_bytes_per_s": 1e9, **fields})
        await self._stack.enter_async_context(host("kvbm", settings, start_kvbm))

    async def asker(self) -> Asker:
        running = await self._stack.enter_async_context(host("frontend", CommonSettings(**self._common), _start_asker))
        assert isinstance(running.app, Asker)
        return running.app


@pytest.fixture
async def place(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(nats_server, namespace, tmp_path, stack)


def _metric(worker: RunningService[WorkerSettings], name: str, **labels: str) -> float:
    return worker.service.metrics.value(name, labels or None)


def _keys(worker: RunningService[WorkerSettings], salt: str = "") -> list[bytes]:
    app = worker.app
    assert isinstance(app, WorkerApp)
    card = app.record.model
    domain = CacheDomain(model_fingerprint=card.fingerprint, block_size=16, kv_layout=card.kv_layout, salt=salt)
    return chain_keys(domain.key(), pack_tokens(PROMPT), 16)


async def test_pins_within_the_share_are_granted(place: Place) -> None:
    await place.worker()
    asker = await place.asker()
    usage = await asker.ask("a", Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")
    assert usage.unpinned_tokens == 0


async def test_what_is_not_pinned_for_the_tenants_share_is_told(place: Place) -> None:
    worker, asker = await place.worker(g1_pin_share=0.25), await place.asker()
    usage = await asker.ask("a", Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")
    assert usage.unpinned_tokens == 4 * 16
    assert _metric(worker, "unpinned_blocks_total") == 4
    # The same ones again, by their next use, and those of another tenant besides.
    assert (await asker.ask("b", Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")).unpinned_tokens == 64
    usage = await asker.ask("c", Retention(end=160, kind="pinned", ttl_s=300.0), salt="x", tenant="other")
    assert usage.unpinned_tokens == 0


async def test_a_pinned_prompt_outlives_others(place: Place) -> None:
    await place.worker(kv_blocks=48)
    asker = await place.asker()
    await asker.ask("a", Retention(kind="pinned", ttl_s=300.0), tenant="t")
    for i in range(4):
        await asker.ask(f"other {i}", salt=str(i))
    assert (await asker.ask("again")).cached_tokens == WHOLE_BLOCKS * 16


async def test_a_pinned_prompt_that_left_g1_outlives_others_in_g2(place: Place) -> None:
    await place.kvbm(g2_bytes=48 * 512, pool_share=1.0, g2_pin_share=1.0)
    worker, asker = await place.worker(kv_blocks=24, g1_pin_share=0.0), await place.asker()
    await eventually(lambda: _metric(worker, "kvbm_attached") == 1, what="an attached kvbm")
    pin = Retention(kind="pinned", ttl_s=300.0)
    # G1 pins nothing, and kvbm has not seen the blocks yet.
    assert (await asker.ask("a", pin, tenant="t")).unpinned_tokens == WHOLE_BLOCKS * 16
    await eventually(
        lambda: _metric(worker, "kvbm_blocks_total", direction="offload") >= WHOLE_BLOCKS, what="written through"
    )
    for i in range(4):
        before = _metric(worker, "kvbm_blocks_total", direction="offload")
        await asker.ask(f"other {i}", salt=str(i))
        await eventually(
            lambda before=before: _metric(worker, "kvbm_blocks_total", direction="offload") > before,  # type: ignore[misc]
            what="blocks written through",
        )
    back = await asker.ask("again", pin, tenant="t")
    assert back.cached_tokens == back.onboarded_tokens == WHOLE_BLOCKS * 16
    assert back.unpinned_tokens == 0


async def test_senseless_retention_is_refused(place: Place) -> None:
    await place.worker()
    asker = await place.asker()
    with pytest.raises(RequestFailed) as refused:
        await asker.ask("a", Retention(kind="for ever"))
    assert (refused.value.code, refused.value.reply.param) == (ErrorCode.INVALID_REQUEST, "retention")


async def test_dropped_blocks_leave_g1_and_the_index(place: Place) -> None:
    worker, asker = await place.worker(), await place.asker()
    await asker.ask("a")
    keys = _keys(worker)
    assert await asker.drop(keys, model="another") == {}
    assert await asker.drop(keys) == {"g1": WHOLE_BLOCKS}
    assert await asker.drop(keys) == {"g1": 0}
    assert _metric(worker, "block_events_total", kind="removed") == WHOLE_BLOCKS
    assert (await asker.ask("b")).cached_tokens == 0


async def test_a_prefetch_brings_a_prompt_back_before_its_request(place: Place) -> None:
    await place.kvbm()
    worker, asker = await place.worker(kv_blocks=24), await place.asker()
    await eventually(lambda: _metric(worker, "kvbm_attached") == 1, what="an attached kvbm")
    await asker.ask("a")
    await eventually(
        lambda: _metric(worker, "kvbm_blocks_total", direction="offload") >= WHOLE_BLOCKS, what="written through"
    )
    await asker.drop(_keys(worker))
    assert await asker.prefetch() == Prefetched("p", cached_tokens=320, onboarded_tokens=320)
    assert await asker.prefetch() == Prefetched("p", cached_tokens=320)
    usage = await asker.ask("b")
    assert (usage.cached_tokens, usage.onboarded_tokens) == (320, 0)
    assert _metric(worker, "prefetches_total", outcome="brought") == 1
    assert _metric(worker, "prefetches_total", outcome="present") == 1


async def test_a_prefetch_that_comes_too_late_says_what_is_there(place: Place) -> None:
    await place.kvbm()
    worker, asker = await place.worker(), await place.asker()
    await eventually(lambda: _metric(worker, "kvbm_attached") == 1, what="an attached kvbm")
    await asker.ask("a")
    keys = _keys(worker)
    await asker.drop(keys[10:])
    assert await asker.prefetch(deadline_ms=_in(-1.0)) == Prefetched("p", cached_tokens=160)


async def test_a_prefetch_of_an_unknown_prefix_needs_its_tokens(place: Place) -> None:
    await place.worker()
    asker = await place.asker()
    answer = await asker.prefetch(reply=NeedTokens, prefix_key=b"x" * 16, prefix_tokens=16)
    assert answer == NeedTokens(request_id="p")


async def test_without_kvbm_a_prefetch_changes_nothing(place: Place) -> None:
    await place.worker()
    asker = await place.asker()
    assert await asker.prefetch() == Prefetched("p", cached_tokens=0)
