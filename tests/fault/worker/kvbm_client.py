"""A worker's side of kvbm without the rest of the worker, and a kvbm with a switch for every fault."""

import asyncio
import contextlib
import math
from collections import Counter
from pathlib import Path

import msgspec

from kvbus_blocks.keys import chain_keys
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.serving import RequestContext
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_transfer.arena import Arena
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
    RetainBlocks,
    Retained,
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
MESSAGES = (AttachPool, ReserveBlocks, CommitBlocks, PinBlocks, ReleaseLease, RetainBlocks)
TOKENS = list(range(40))
KEYS = chain_keys(DOMAIN, pack_tokens(TOKENS), BLOCK)


class FakeKvbm:
    """Just enough of kvbm, with a switch for every fault. ``blocks``: key -> slot index, checksum.

    ``below``: keys of blocks that count as lying in a lower tier, ``tier`` (or that of ``tiers``); each pin that waits brings
    ``lifts`` of them up once ``lift`` is set. ``unpinned``: what it says of RetainBlocks."""

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
        self.below: set[bytes] = set()
        self.tier = "g3"
        self.tiers: dict[bytes, str] = {}
        self.asked_tiers: list[tuple[str, ...]] = []
        self.lift = asyncio.Event()
        self.lift.set()
        self.lifts = 3
        self.max_wait_s = 60.0
        self.waits: list[float] = []
        self.retained: list[RetainBlocks] = []
        self.reservations: list[ReserveBlocks] = []
        self.unpinned: tuple[int, ...] = ()
        self.pool_id = f"pool-{service.incarnation}"
        self.parents: set[bytes] = {b""}

    async def handle(self, message: Message, context: RequestContext) -> Message:
        kind = type(message).__name__
        self.calls.append(kind)
        if kind in self.hang:
            await asyncio.Event().wait()
        if kind in self.refuse:
            code = self.refuse[kind]
            raise RequestFailed.of(code, "told to", retryable=code is ErrorCode.OVERLOADED)
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
                return await self._pin(message)
            case RetainBlocks():
                self.retained.append(message)
                return Retained(unpinned=self.unpinned)
            case ReleaseLease():
                self.released.append(message)
                return Done()
        raise AssertionError(kind)

    def _reserve(self, message: ReserveBlocks) -> ReservedBlocks:
        self.reservations.append(message)
        keys = unpack_keys(message.keys)
        if message.parent not in self.parents:
            return ReservedBlocks(lease_id="", lease_s=0.0, slots=(None,) * len(keys))
        free = iter(set(range(SLOTS)) - {slot.index for slot in self.blocks.values()})
        slots = [None if key in self.blocks else Slot(index=next(free), generation=1) for key in keys]
        lease_id = f"w{len(self.calls)}"
        self.reserved[lease_id] = (keys, slots)
        return ReservedBlocks(lease_id=lease_id, lease_s=self.lease_s, slots=tuple(slots))

    async def _pin(self, message: PinBlocks) -> PinnedBlocks:
        keys = unpack_keys(message.keys)
        known = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        high = next((i for i, key in enumerate(keys[:known]) if key in self.below), known)
        self.waits.append(message.wait_s)
        brought: Counter[str] = Counter()
        if message.wait_s:
            self.asked_tiers.append(message.tiers)
        if not high and known and message.wait_s:
            try:
                async with asyncio.timeout(min(message.wait_s, self.max_wait_s)):
                    await self.lift.wait()
            except TimeoutError:
                awaits = self.tiers.get(keys[0], self.tier)
                return PinnedBlocks(lease_id="", lease_s=0.0, slots=(), coming=known, awaits=awaits)
            high = min(known, self.lifts)
            brought.update(self.tiers.get(key, self.tier) for key in keys[:high] if key in self.below)
            del brought["g2"]
            self.below.difference_update(keys[:high])
        lease_id = f"r{len(self.calls)}" if high else ""
        slots = tuple(self.blocks[key] for key in keys[:high])
        coming = known - high if message.wait_s else 0
        return PinnedBlocks(lease_id=lease_id, lease_s=self.lease_s, slots=slots, coming=coming, brought=dict(brought))

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
            onboard_timeout_s=0.5,
            onboard_batch_blocks=3,
            onboard_batch_bytes=1 << 20,
            onboard_min_blocks=1,
            onboard_max_blocks=SLOTS,
            onboard_parallel=1,
            onboard_probe_s=10.0,
            offload_gather_s=0.0,
            offload_repair_s=0.01,
            max_keys=1000,
        )
        self.kvbm = Kvbm(
            link,
            self.engine,
            self.store,
            OffloadQueue(limit_blocks=SLOTS, batch_blocks=4),
            limits,
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

    def slow_prefill(self) -> None:
        """Computing takes so long that anything else is sooner."""
        self.prefill(1.0)

    def prefill(self, tokens_per_s: float) -> None:
        load = self.engine.load
        self.engine.load = lambda: msgspec.structs.replace(load(), prefill_tokens_per_s=tokens_per_s)  # type: ignore[method-assign]

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


async def start_client(service: Service, settings: CommonSettings) -> Client:
    client = Client(service)
    await client.engine.start(client.sink)
    client.kvbm.start()
    return client


def kvbm_host(
    settings: CommonSettings, directory: Path, *, g3_bytes: int = 0, g4_store: str = ""
) -> contextlib.AbstractAsyncContextManager[RunningService[CommonSettings]]:
    async def start(service: Service, settings: CommonSettings) -> FakeKvbm:
        fake = FakeKvbm(service, directory)
        await service.bus.serve(service.bus.subjects.kvbm(service.instance_id), MESSAGES, fake.handle)
        await service.register(kvbm=KvbmRecord(g2_bytes=1, g3_bytes=g3_bytes, g4_store=g4_store))
        return fake

    return host("kvbm", settings, start)


async def offloaded(client: Client, fake: FakeKvbm) -> None:
    """All blocks are with kvbm, and the worker has heard that they are."""
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_blocks_total", direction="offload") == len(KEYS), what="all blocks written through"
    )
    assert len(fake.blocks) == len(KEYS)
