"""A worker that only moves blocks, and a frontend that only counts tokens, for `kvbus bench kvbm`."""

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_transfer import Arena, checksum, copy_verified
from kvbus_wire.frontend import StepFrame
from kvbus_wire.kvbm import (
    AttachedPool,
    AttachPool,
    CommitBlocks,
    PinBlocks,
    PinnedBlocks,
    ReleaseLease,
    ReserveBlocks,
    ReservedBlocks,
)
from kvbus_wire.packing import pack_keys, pack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.worker import Accepted, BlockSnapshot, BlockSnapshotChunk, Done, Generate

BATCH_BLOCKS = 8
"""What a worker copies out before it hands it to its engine."""


class _Nobody:
    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


@asynccontextmanager
async def on_the_bus(service: str, nats_url: str, namespace: str) -> AsyncIterator[Service]:
    settings = CommonSettings(nats=nats_url, namespace=namespace, health_port=-1, log_level="error")

    async def begin(service: Service, settings: CommonSettings) -> _Nobody:
        return _Nobody()

    async with host(service, settings, begin) as running:
        yield running.service


class Mover:
    """Blocks of ``block_bytes`` to and from the kvbm ``kvbm_id``. Its scratch memory holds one batch."""

    def __init__(self, service: Service, kvbm_id: str, block_bytes: int) -> None:
        self._service = service
        self._kvbm_id = kvbm_id
        self.block_bytes = block_bytes
        self.pool = AttachedPool(pool_id="", path="", slot_bytes=0, slots=0)
        self._arena: Arena | None = None
        self._scratch = memoryview(bytearray(b"\x01" * (block_bytes * BATCH_BLOCKS)))

    async def attach(self) -> None:
        self.pool = await self._ask(
            AttachPool(
                instance_id=self._service.instance_id,
                incarnation=self._service.incarnation,
                model="bench",
                kv_layout="bench",
                block_bytes=self.block_bytes,
            ),
            AttachedPool,
        )
        self._arena = Arena.open(self.pool.path, self.pool.slot_bytes, self.pool.slots)

    async def offload(self, keys: Sequence[bytes]) -> None:
        """A chain of random blocks. Raise RuntimeError when there is no room."""
        parent = b""
        for start in range(0, len(keys), 16):
            part = keys[start : start + 16]
            reserved: ReservedBlocks = await self._ask(
                ReserveBlocks(
                    pool_id=self.pool.pool_id,
                    instance_id=self._service.instance_id,
                    parent=parent,
                    keys=pack_keys(part),
                ),
                ReservedBlocks,
            )
            sums: list[int | None] = []
            for slot in reserved.slots:
                if slot is None:
                    raise RuntimeError("kvbm has no room for the blocks of the measurement")
                view = self._view(slot.index)
                piece = os.urandom(4096)
                view[:] = (piece * (len(view) // 4096 + 1))[: len(view)]
                sums.append(checksum(view))
            await self._ask(CommitBlocks(lease_id=reserved.lease_id, checksums=tuple(sums)), Done)
            parent = part[-1]

    async def onboard(self, keys: Sequence[bytes], wait_s: float = 0.0) -> tuple[int, float, float]:
        """Copy the chain out and verify it, as a worker does: blocks, seconds, and seconds of these spent copying."""
        started_s, copying_s, done = time.perf_counter(), 0.0, 0
        while done < len(keys):
            pinned: PinnedBlocks = await self._ask(
                PinBlocks(
                    pool_id=self.pool.pool_id,
                    instance_id=self._service.instance_id,
                    keys=pack_keys(keys[done:]),
                    wait_s=wait_s,
                    parent=keys[done - 1] if done else b"",
                ),
                PinnedBlocks,
            )
            if not pinned.lease_id:
                break
            begun_s = time.perf_counter()
            await asyncio.to_thread(self._copy, [(slot.index, slot.checksum) for slot in pinned.slots])
            copying_s += time.perf_counter() - begun_s
            done += len(pinned.slots)
            await self._ask(ReleaseLease(lease_id=pinned.lease_id), Done)
        return done, time.perf_counter() - started_s, copying_s

    def plain_copy_s(self, blocks: int) -> float:
        """Seconds that a plain copy of so many slots into the same scratch memory takes."""
        started_s = time.perf_counter()
        for index in range(blocks):
            self._into(index)[:] = self._view(index)
        return time.perf_counter() - started_s

    async def in_tier(self, tier: str) -> int:
        """How many blocks kvbm has there."""
        found, request = 0, BlockSnapshot()
        while True:
            subject = self._service.bus.subjects.control(self._kvbm_id)
            chunk: BlockSnapshotChunk = await self._service.bus.request(
                subject, request, BlockSnapshotChunk, timeout_s=10
            )
            found += sum(len(chain.keys) // 16 for chain in chunk.chains if chunk.tier == tier)
            if chunk.next_cursor is None:
                return found
            request = BlockSnapshot(cursor=chunk.next_cursor, snapshot_id=chunk.snapshot_id)

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()

    def _copy(self, slots: Sequence[tuple[int, int]]) -> None:
        """A batch at a time, as a worker has it."""
        for start in range(0, len(slots), BATCH_BLOCKS):
            batch = slots[start : start + BATCH_BLOCKS]
            blocks = [(self._view(index), self._into(place), expected) for place, (index, expected) in enumerate(batch)]
            if copy_verified(blocks) < len(batch):
                raise RuntimeError("a block did not hold")

    def _into(self, place: int) -> memoryview:
        start = place % BATCH_BLOCKS * self.block_bytes
        return self._scratch[start : start + self.block_bytes]

    def _view(self, index: int) -> memoryview:
        assert self._arena is not None  # noqa: S101  (attached)
        return self._arena.view(index)[: self.block_bytes]

    async def _ask(self, request: Any, reply: type[Any]) -> Any:
        subject = self._service.bus.subjects.kvbm(self._kvbm_id)
        return await self._service.bus.request(subject, request, reply, timeout_s=30)


class Decoding(msgspec.Struct):
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    ended: int = 0


class Decoder:
    """Asks workers for tokens and takes the time between the first and the last of them."""

    def __init__(self, service: Service, model: str, vocabulary: int, seed: int) -> None:
        self._service = service
        self._model = model
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._now = Decoding()
        self._done = asyncio.Event()
        self._wanted = 0

    async def begin(self) -> None:
        subject = self._service.bus.subjects.steps(self._service.instance_id)
        await self._service.bus.subscribe(subject, [StepFrame], self._on_frame)

    async def tokens_per_s(self, worker: str, requests: int, prompt_tokens: int, max_tokens: int) -> float:
        """Of new prompts, all decoded at the same time."""
        self._now, self._wanted = Decoding(), requests
        self._done.clear()
        for _ in range(requests):
            tokens = [self._random.randrange(100, self._vocabulary) for _ in range(prompt_tokens)]
            generate = Generate(
                request_id=secrets.token_hex(4),
                model=self._model,
                frontend_id=self._service.instance_id,
                tokens=pack_tokens(tokens),
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
                deadline_ms=int(time.time() * 1000) + 300_000,
            )
            subject = self._service.bus.subjects.generate(worker)
            await self._service.bus.request(subject, generate, Accepted, timeout_s=60)
        async with asyncio.timeout(300):
            await self._done.wait()
        return (self._now.tokens - requests) / max(self._now.last_s - self._now.first_s, 1e-9)

    def _on_frame(self, frame: StepFrame) -> None:
        now_s, count = time.perf_counter(), sum(len(delta.tokens) // 4 for delta in frame.deltas)
        if count:
            self._now.first_s = self._now.first_s or now_s
            self._now.last_s = now_s
            self._now.tokens += count
        self._now.ended += len(frame.ended)
        if self._now.ended >= self._wanted:
            self._done.set()
