"""A worker that speaks kvbm's protocol as the test tells it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_transfer import Arena, checksum
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
from kvbus_wire.packing import pack_keys
from kvbus_wire.records import ModelCard, WorkerRecord
from kvbus_wire.worker import BlockSnapshot, BlockSnapshotChunk, Done

BLOCK_BYTES = 1000
STREAM_BYTES = 8 << 20
"""``kv_stream_max_bytes`` of all instances of a test: a stream reserves its limit on the server that all tests share."""


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def content(name: str) -> bytes:
    """What the block holds: its name decides it."""
    return (blake2b(name.encode()).digest() * (BLOCK_BYTES // 64 + 1))[:BLOCK_BYTES]


class _Idle:
    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


class ByHand:
    """A worker in the directory that does what the test tells it."""

    def __init__(self, service: Service, kvbm_id: str) -> None:
        self.service = service
        self.kvbm_id = kvbm_id
        self.model = "tiny"
        self.pool: AttachedPool | None = None
        self.arena: Arena | None = None

    async def ask(self, request: Any, reply: type[Any]) -> Any:
        subject = self.service.bus.subjects.kvbm(self.kvbm_id)
        return await self.service.bus.request(subject, request, reply, timeout_s=10)

    async def attach(self, **fields: Any) -> AttachedPool:
        values = {"model": self.model, "kv_layout": "layout", "block_bytes": BLOCK_BYTES, "block_size": 16, **fields}
        attached: AttachedPool = await self.ask(
            AttachPool(instance_id=self.service.instance_id, incarnation=self.service.incarnation, **values),
            AttachedPool,
        )
        self.pool = attached
        if self.arena is not None:
            self.arena.close()
        self.arena = Arena.open(attached.path, attached.slot_bytes, attached.slots)
        return attached

    @property
    def pool_id(self) -> str:
        assert self.pool is not None
        return self.pool.pool_id

    def slot(self, index: int) -> memoryview:
        assert self.arena is not None
        return self.arena.view(index)[:BLOCK_BYTES]

    async def reserve(self, names: Sequence[str], parent: str = "") -> ReservedBlocks:
        reserved: ReservedBlocks = await self.ask(
            ReserveBlocks(
                pool_id=self.pool_id,
                instance_id=self.service.instance_id,
                parent=key(parent) if parent else b"",
                keys=pack_keys(map(key, names)),
            ),
            ReservedBlocks,
        )
        return reserved

    def write(self, names: Sequence[str], reserved: ReservedBlocks) -> list[int | None]:
        checksums: list[int | None] = []
        for name, slot in zip(names, reserved.slots, strict=True):
            if slot is None:
                checksums.append(None)
            else:
                view = self.slot(slot.index)
                view[:] = content(name)
                checksums.append(checksum(view))
        return checksums

    async def commit(self, lease_id: str, checksums: Sequence[int | None]) -> None:
        await self.ask(CommitBlocks(lease_id=lease_id, checksums=tuple(checksums)), Done)

    async def offload(self, names: Sequence[str], parent: str = "") -> int:
        """How many blocks were wanted."""
        reserved = await self.reserve(names, parent)
        if reserved.lease_id:
            await self.commit(reserved.lease_id, self.write(names, reserved))
        return sum(slot is not None for slot in reserved.slots)

    async def pin(self, names: Sequence[str]) -> PinnedBlocks:
        pinned: PinnedBlocks = await self.ask(
            PinBlocks(pool_id=self.pool_id, instance_id=self.service.instance_id, keys=pack_keys(map(key, names))),
            PinnedBlocks,
        )
        return pinned

    async def release(self, lease_id: str, corrupt: Sequence[int] = ()) -> None:
        await self.ask(ReleaseLease(lease_id=lease_id, corrupt=tuple(corrupt)), Done)

    async def onboard(self, names: Sequence[str]) -> list[bytes]:
        """The leading blocks that are there and whole."""
        pinned = await self.pin(names)
        blocks: list[bytes] = []
        corrupt: list[int] = []
        for position, slot in enumerate(pinned.slots):
            block = bytes(self.slot(slot.index))
            if checksum(block) != slot.checksum:
                corrupt.append(position)
                break
            blocks.append(block)
        if pinned.lease_id:
            await self.release(pinned.lease_id, corrupt)
        return blocks

    async def snapshot(self) -> list[BlockSnapshotChunk]:
        subject = self.service.bus.subjects.control(self.kvbm_id)
        chunks: list[BlockSnapshotChunk] = []
        request = BlockSnapshot()
        while True:
            chunk: BlockSnapshotChunk = await self.service.bus.request(
                subject, request, BlockSnapshotChunk, timeout_s=10
            )
            chunks.append(chunk)
            if chunk.next_cursor is None:
                return chunks
            request = BlockSnapshot(cursor=chunk.next_cursor, snapshot_id=chunk.snapshot_id)


@asynccontextmanager
async def by_hand(nats_url: str, namespace: str, instance_id: str, kvbm_id: str) -> AsyncIterator[ByHand]:
    """A registered worker; leaving the block takes it out of the directory."""
    settings = CommonSettings(
        nats=nats_url,
        namespace=namespace,
        instance_id=instance_id,
        host_id="host-1",
        health_port=-1,
        lease_ttl_s=2,
        kv_stream_max_bytes=STREAM_BYTES,
    )

    async def begin(service: Service, settings: CommonSettings) -> _Idle:
        card = ModelCard(name="tiny", fingerprint="f", block_size=16, context_length=64, bundle="", kv_layout="layout")
        record = WorkerRecord(
            model=card,
            engine="mock",
            total_blocks=8,
            max_num_seqs=1,
            max_batched_tokens=64,
            prefill_tokens_per_s=1.0,
            decode_step_s=1.0,
        )
        await service.register(worker=record)
        return _Idle()

    async with host("worker", settings, begin) as running:
        client = ByHand(running.service, kvbm_id)
        try:
            yield client
        finally:
            if client.arena is not None:
                client.arena.close()
