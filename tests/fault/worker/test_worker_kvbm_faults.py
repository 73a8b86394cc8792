"""A kvbm that fails in every way costs a recompute, never a request, and never gives wrong data."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvbus_blocks.keys import chain_keys
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.serving import RequestContext
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_transfer.arena import Arena, checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import (
    AttachedPool,
    AttachPool,
    CommitBlocks,
    PinBlocks,
    PinnedBlocks,
    ReleaseLease,
    ReserveBlocks,
    ReservedBlocks,
    Slot,
)
from kvbus_wire.message import Message
from kvbus_wire.packing import pack_tokens, unpack_keys
from kvbus_wire.records import KvbmRecord
from kvbus_wire.worker import Done
from kvbus_worker.adapters.kvbm import Kvbm, KvbmLimits
from kvbus_worker.adapters.kvbm_link import KvbmLink
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.offload import OffloadQueue
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import StepOutput
from kvbus_worker.engines.mock import MockConfig, MockEngine, TimingModel, TokenizerVocabulary

DOMAIN = b"d" * 32
BLOCK = 4
SLOTS = 16
MESSAGES = (AttachPool, ReserveBlocks, CommitBlocks, PinBlocks, ReleaseLease)
TOKENS = list(range(40))
KEYS = chain_keys(DOMAIN, pack_tokens(TOKENS), BLOCK)


class FakeKvbm:
    """Just enough of kvbm, with a switch for every fault. ``blocks``: key -> slot index, checksum."""

    def __init__(self, service: Service, directory: Path) -> None:
        self.service = service
        self.directory = directory
        self.arena: Arena | None = None
        self.blocks: dict[bytes, Slot] = {}
        self.reserved: dict[str, tuple[list[bytes], list[Slot | None]]] = {}
        self.released: list[ReleaseLease] = []
        self.calls: list[str] = []
        self.refuse: dict[str, ErrorCode] = {}
        self.hang: set[str] = set()
        self.lease_s = 10.0
        self.pool_id = f"pool-{service.incarnation}"
        self.parents: set[bytes] = {b""}

    async def handle(self, message: Message, context: RequestContext) -> Message:
        kind = type(message).__name__
        self.calls.append(kind)
        if kind in self.hang:
            await asyncio.Event().wait()
        if kind in self.refuse:
            raise RequestFailed.of(self.refuse[kind], "told to")
        match message:
            case AttachPool():
                if self.arena is None:
                    path = self.directory / f"arena-{self.service.incarnation}"
                    self.arena = await asyncio.to_thread(Arena.create, path, message.block_bytes, SLOTS)
                return AttachedPool(
                    pool_id=self.pool_id, path=str(self.arena.path), slot_bytes=message.block_bytes, slots=SLOTS
                )
            case ReserveBlocks():
                return self._reserve(message)
            case CommitBlocks():
                keys, slots = self.reserved.pop(message.lease_id)
                for key, slot, value in zip(keys, slots, message.checksums, strict=True):
                    if slot is not None and value is not None:
                        self.blocks[key] = msgspec.structs.replace(slot, checksum=value)
                        self.parents.add(key)
                return Done()
            case PinBlocks():
                return self._pin(message)
            case ReleaseLease():
                self.released.append(message)
                return Done()
        raise AssertionError(kind)

    def _reserve(self, message: ReserveBlocks) -> ReservedBlocks:
        keys = unpack_keys(message.keys)
        if message.parent not in self.parents:
            return ReservedBlocks(lease_id="", lease_s=0.0, slots=(None,) * len(keys))
        free = iter(set(range(SLOTS)) - {slot.index for slot in self.blocks.values()})
        slots = [None if key in self.blocks else Slot(index=next(free), generation=1) for key in keys]
        lease_id = f"w{len(self.calls)}"
        self.reserved[lease_id] = (keys, slots)
        return ReservedBlocks(lease_id=lease_id, lease_s=self.lease_s, slots=tuple(slots))

    def _pin(self, message: PinBlocks) -> PinnedBlocks:
        slots = []
        for key in unpack_keys(message.keys):
            if key not in self.blocks:
                break
            slots.append(self.blocks[key])
        lease_id = f"r{len(self.calls)}" if slots else ""
        return PinnedBlocks(lease_id=lease_id, lease_s=self.lease_s, slots=tuple(slots))

    def spoil(self, key: bytes) -> None:
        assert self.arena is not None
        view = self.arena.view(self.blocks[key].index)
        view[0] ^= 1

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        if self.arena is not None:
            self.arena.remove()


class Client:
    """A worker's kvbm side without the rest of the worker."""

    def __init__(self, service: Service) -> None:
        vocabulary = TokenizerVocabulary(load_tokenizer(byte_level_bundle()))
        config = MockConfig(block_size=BLOCK, total_blocks=SLOTS, timing=TimingModel(speedup=math.inf))
        self.engine = MockEngine(config, vocabulary)
        self.service = service
        self.store = TokenStore(SLOTS, BLOCK)
        info = self.engine.info
        attach = AttachPool(
            instance_id=service.instance_id,
            incarnation=service.incarnation,
            model="m",
            kv_layout=info.kv_layout,
            block_bytes=info.block_bytes,
            block_size=BLOCK,
        )
        metrics = WorkerMetrics(service.metrics)
        link = KvbmLink(
            service.bus,
            service.directory,
            attach,
            host_id=service.host_id,
            timeout_s=0.3,
            retry_s=0.05,
            metrics=metrics,
            log=service.log,
        )
        limits = KvbmLimits(
            request_timeout_s=0.3,
            onboard_timeout_s=0.5,
            onboard_batch_blocks=3,
            onboard_min_blocks=1,
            onboard_max_blocks=SLOTS,
            onboard_parallel=1,
            offload_repair_s=0.01,
        )
        self.kvbm = Kvbm(
            service.bus,
            link,
            self.engine,
            self.store,
            OffloadQueue(limit_blocks=SLOTS, batch_blocks=4),
            limits,
            instance_id=service.instance_id,
            spawn=service.spawn,
            metrics=metrics,
        )
        self.link = link

    def sink(self, output: StepOutput) -> None:
        for event in output.blocks:
            self.store.apply(event)
            self.kvbm.on_block_event(event)

    async def compute(self, count: int = len(KEYS)) -> None:
        """Let the engine hold the leading blocks, as if it had computed them."""
        tokens = [pack_tokens(TOKENS[BLOCK * i : BLOCK * i + BLOCK]) for i in range(count)]
        assert self.engine.scheduler.cache.adopt(b"", KEYS[:count], tokens) == count
        self.sink(StepOutput(blocks=self.engine.scheduler.cache.take_events()))

    def lose_all(self) -> None:
        """Evict everything from G1."""
        cache = self.engine.scheduler.cache
        cache.allocate(SLOTS)
        cache.free(SLOTS)
        self.sink(StepOutput(blocks=cache.take_events()))

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.value(name, labels or None)

    async def onboard(self) -> int:
        await eventually(lambda: self.link.pool is not None, what="an attached kvbm")
        assert self.kvbm.can_onboard(KEYS)
        return await self.kvbm.onboard(KEYS, pack_tokens(TOKENS))

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        self.kvbm.close()
        await self.engine.stop()


async def _start_client(service: Service, settings: CommonSettings) -> Client:
    client = Client(service)
    await client.engine.start(client.sink)
    client.kvbm.start()
    return client


@pytest.fixture
async def settings(nats_server: NatsServer, namespace: str) -> CommonSettings:
    return CommonSettings(nats=nats_server.url, namespace=namespace, host_id="h", health_port=-1, drain_timeout_s=1.0)


def kvbm_host(
    settings: CommonSettings, directory: Path
) -> contextlib.AbstractAsyncContextManager[RunningService[CommonSettings]]:
    async def start(service: Service, settings: CommonSettings) -> FakeKvbm:
        fake = FakeKvbm(service, directory)
        await service.bus.serve(service.bus.subjects.kvbm(service.instance_id), MESSAGES, fake.handle)
        await service.register(kvbm=KvbmRecord(g2_bytes=1))
        return fake

    return host("kvbm", settings, start)


@pytest.fixture
async def pair(settings: CommonSettings, tmp_path: Path) -> AsyncIterator[tuple[Client, FakeKvbm]]:
    async with kvbm_host(settings, tmp_path) as kvbm, host("worker", settings, _start_client) as worker:
        client, fake = worker.app, kvbm.app
        assert isinstance(client, Client)
        assert isinstance(fake, FakeKvbm)
        yield client, fake


async def _offloaded(client: Client, fake: FakeKvbm) -> None:
    """All blocks are with kvbm, and the worker has heard that they are."""
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_blocks_total", direction="offload") == len(KEYS), what="all blocks written through"
    )
    assert len(fake.blocks) == len(KEYS)


async def test_new_blocks_are_written_through_with_true_checksums(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    assert fake.arena is not None
    for slot in fake.blocks.values():
        assert checksum(fake.arena.view(slot.index)) == slot.checksum


async def test_blocks_beyond_g1_are_onboarded_and_the_lease_is_released(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    await client.compute(2)
    assert await client.onboard() == (len(KEYS) - 2) * BLOCK
    assert client.engine.cached_blocks(KEYS) == len(KEYS)
    await eventually(lambda: fake.released, what="the release")
    assert fake.released[0].corrupt == ()
    assert not client.kvbm.can_onboard(KEYS), "nothing is missing any more"
    assert client.kvbm.rates.tokens_per_s["g2"] > 0, "what routers are told"


async def test_onboarded_blocks_are_not_written_through_again(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    reserves = fake.calls.count("ReserveBlocks")
    assert await client.onboard() == len(KEYS) * BLOCK
    assert client.metric("offload_queue_blocks") == 0
    assert fake.calls.count("ReserveBlocks") == reserves


async def test_a_corrupt_block_ends_the_run_before_it_and_is_reported(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.spoil(KEYS[4])
    assert await client.onboard() == 4 * BLOCK
    assert client.engine.cached_blocks(KEYS) == 4
    await eventually(lambda: fake.released, what="the release")
    assert fake.released[0].corrupt == (4,)
    assert client.metric("kvbm_failures_total", operation="onboard", reason="corrupt") == 1


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.DRAINING])
async def test_a_refusing_kvbm_means_recompute_and_a_rest(pair: tuple[Client, FakeKvbm], code: ErrorCode) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.refuse["PinBlocks"] = code
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason=str(code)) == 1
    del fake.refuse["PinBlocks"]
    assert await client.onboard() == len(KEYS) * BLOCK, "after the rest it is asked again"


async def test_a_kvbm_that_does_not_answer_costs_a_bounded_time(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.hang.add("PinBlocks")
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason="deadline_exceeded") == 1


async def test_a_lease_that_ended_during_the_copy_gives_nothing(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.lease_s = 0.0
    assert await client.onboard() == 0
    assert client.engine.cached_blocks(KEYS) == 0


async def test_a_lost_pool_is_attached_anew(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.refuse["PinBlocks"] = ErrorCode.GONE
    assert await client.onboard() == 0
    del fake.refuse["PinBlocks"]
    await eventually(lambda: fake.calls.count("AttachPool") == 2, what="the second attach")
    assert await client.onboard() == len(KEYS) * BLOCK


async def test_write_through_goes_on_after_a_failure(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    fake.refuse["ReserveBlocks"] = ErrorCode.OVERLOADED
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_failures_total", operation="offload", reason="overloaded") > 0, what="a failure"
    )
    del fake.refuse["ReserveBlocks"]
    await eventually(lambda: client.metric("offload_queue_blocks") == 0, what="an empty queue")
    client.lose_all()
    await _offloaded(client, fake)


async def test_a_kvbm_that_lost_the_beginning_of_a_chain_gets_the_whole_chain_again(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await client.compute(8)
    await eventually(lambda: len(fake.blocks) == 8, what="eight blocks written through")
    fake.blocks.clear()
    fake.parents = {b""}
    await client.compute()
    await eventually(lambda: set(fake.blocks) == set(KEYS), what="the whole chain")


async def test_a_restarted_kvbm_is_attached_and_offered_what_g1_holds(settings: CommonSettings, tmp_path: Path) -> None:
    async with host("worker", settings, _start_client) as worker:
        client = worker.app
        assert isinstance(client, Client)
        await client.compute()
        for _ in range(2):
            async with kvbm_host(settings, tmp_path) as kvbm:
                fake = kvbm.app
                assert isinstance(fake, FakeKvbm)
                await eventually(lambda fake=fake: set(fake.blocks) == set(KEYS), what="all of G1")  # type: ignore[misc]
            await eventually(lambda: client.link.pool is None, what="the end of the link")
        assert not client.kvbm.can_onboard(KEYS)


async def test_a_kvbm_of_another_host_is_not_used(settings: CommonSettings, tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(settings, host_id="other")
    async with kvbm_host(elsewhere, tmp_path) as kvbm, host("worker", settings, _start_client) as worker:
        client, fake = worker.app, kvbm.app
        assert isinstance(client, Client)
        assert isinstance(fake, FakeKvbm)
        await eventually(lambda: worker.service.directory.instances("kvbm"), what="the other host's kvbm")
        await client.compute()
        assert client.link.pool is None
        assert fake.calls == []


async def test_too_many_onboardings_at_once_recompute(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _offloaded(client, fake)
    client.lose_all()
    fake.hang.add("PinBlocks")
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    first = asyncio.create_task(client.onboard())
    await eventually(lambda: "PinBlocks" in fake.calls, what="the first onboarding")
    assert not client.kvbm.can_onboard(KEYS)
    assert client.metric("kvbm_onboard_skipped_total") == 1
    assert await first == 0
