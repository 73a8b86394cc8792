"""Instances that take part in the bus like a worker or a kvbm, but have no engine: tests say what they hold, lose and report."""

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvbus_runtime.bus import RequestContext, Subscription
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored, encode_events
from kvbus_wire.load import LoadReport
from kvbus_wire.message import CONTENT_TYPE
from kvbus_wire.packing import pack_keys
from kvbus_wire.records import KvbmRecord, ModelCard, WorkerRecord
from kvbus_wire.worker import BlockSnapshot, BlockSnapshotChunk, SnapshotChain

BLOCK_SIZE = 16


def block_key(number: int) -> bytes:
    """The key of a block that a test calls by a number."""
    return number.to_bytes(8, "little") + bytes(8)


def block_keys(*numbers: int) -> bytes:
    return pack_keys(map(block_key, numbers))


def chain_to(number: int) -> list[int]:
    """In the tree of blocks in which block k (from 1) has the parent k // 2 (0: the root)."""
    chain = []
    while number:
        chain.append(number)
        number //= 2
    return chain[::-1]


class FakeInstance:
    """One model, one tier. Blocks are numbers; every change is an event, unless it is ``lost`` on its way."""

    def __init__(self, service: Service, model: str, tier: str) -> None:
        self.service = service
        self.model = model
        self.tier = tier
        self.seq = 0
        self.parents: dict[int, int | None] = {}
        self.answers_snapshots = True
        self.is_holding_back = False
        self._held_back: list[KvEvents] = []
        self.snapshots_taken = 0
        self._log = EventLog(service.bus)
        self._snapshots: dict[str, list[BlockSnapshotChunk]] = {}
        self._numbers = itertools.count(1)
        self._control: Subscription | None = None

    @property
    def instance_id(self) -> str:
        return self.service.instance_id

    async def open(self, worker: WorkerRecord | None, kvbm: KvbmRecord | None) -> None:
        bus = self.service.bus
        self._control = await bus.serve(bus.subjects.control(self.instance_id), [BlockSnapshot], self._on_snapshot)
        await self.service.register(worker=worker, kvbm=kvbm)

    async def store(self, *numbers: int, parent: int | None = None, lost: bool = False) -> None:
        above = parent
        for number in numbers:
            self.parents[number] = above
            above = number
        event = Stored(b"" if parent is None else block_key(parent), block_keys(*numbers))
        await self._emit([event], lost)

    async def remove(self, *numbers: int, lost: bool = False) -> None:
        for number in numbers:
            self.parents.pop(number, None)
        await self._emit([Removed(block_keys(*numbers))], lost)

    async def clear(self, *, lost: bool = False) -> None:
        self.parents.clear()
        await self._emit([Cleared()], lost)

    async def _emit(self, events: Sequence[KvEvent], lost: bool) -> None:
        batch = KvEvents(
            instance_id=self.instance_id,
            incarnation=self.service.incarnation,
            model=self.model,
            tier=self.tier,
            first_seq=self.seq + 1,
            events=tuple(events),
        )
        self.seq += len(events)
        if self.is_holding_back:
            self._held_back.append(batch)
        elif not lost:
            await self._append(batch)

    async def release(self) -> None:
        """Send what was emitted while ``is_holding_back`` was set, the last first."""
        self.is_holding_back = False
        while self._held_back:
            await self._append(self._held_back.pop())

    async def _append(self, batch: KvEvents) -> None:
        subject = self.service.bus.subjects.kv_events(self.model, self.instance_id)
        msg_id = f"{self.instance_id}:{batch.incarnation}:{self.tier}:{batch.first_seq}"
        await self._log.append(subject, encode_events(batch), msg_id=msg_id, content_type=CONTENT_TYPE)

    async def report_load(
        self,
        *,
        running: int = 0,
        waiting: int = 0,
        waiting_tokens: int = 0,
        request_ids: Iterable[str] = (),
        draining: bool = False,
    ) -> None:
        report = LoadReport(
            instance_id=self.instance_id,
            incarnation=self.service.incarnation,
            model=self.model,
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            used_blocks=0,
            total_blocks=1000,
            kv_seq=self.seq,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
            draining=draining,
            request_ids=tuple(request_ids),
        )
        await self.service.bus.publish(self.service.bus.subjects.load(self.instance_id), report)

    async def _on_snapshot(self, request: BlockSnapshot, context: RequestContext) -> BlockSnapshotChunk:
        if not self.answers_snapshots:
            raise RequestFailed.of(ErrorCode.UNAVAILABLE, "no snapshots here", retryable=True)
        snapshot_id = request.snapshot_id
        if not snapshot_id:
            self.snapshots_taken += 1
            snapshot_id = f"s{next(self._numbers)}"
            self._snapshots = {snapshot_id: self._take(snapshot_id)}
        if snapshot_id not in self._snapshots:
            raise RequestFailed.of(ErrorCode.GONE, "the snapshot has expired", retryable=True)
        return self._snapshots[snapshot_id][request.cursor]

    def _take(self, snapshot_id: str) -> list[BlockSnapshotChunk]:
        """Two blocks per part, so that several parts are needed."""
        links = list(self.parents.items())
        parts = [links[first : first + 2] for first in range(0, len(links), 2)] or [[]]
        return [
            BlockSnapshotChunk(
                snapshot_id=snapshot_id,
                instance_id=self.instance_id,
                incarnation=self.service.incarnation,
                model=self.model,
                tier=self.tier,
                kv_seq=self.seq,
                chains=tuple(
                    SnapshotChain(parent=b"" if parent is None else block_key(parent), keys=block_key(number))
                    for number, parent in part
                ),
                next_cursor=index + 1 if index + 1 < len(parts) else None,
            )
            for index, part in enumerate(parts)
        ]

    async def drain(self, reason: str) -> None:
        if self._control is not None:
            await self._control.stop()

    async def close(self) -> None:
        pass


def worker_record(
    model: str, *, max_num_seqs: int = 4, total_blocks: int = 1000, kv_events: bool = True
) -> WorkerRecord:
    card = ModelCard(
        name=model, fingerprint="f", block_size=BLOCK_SIZE, context_length=100_000, bundle="none", kv_layout="fake"
    )
    return WorkerRecord(
        model=card,
        engine="fake",
        total_blocks=total_blocks,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=512,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        kv_events=kv_events,
    )


@asynccontextmanager
async def fake_worker(settings: CommonSettings, model: str, **record: Any) -> AsyncIterator[FakeInstance]:
    """A worker of this model, registered. ``record``: fields of `worker_record`."""

    async def start(service: Service, _settings: CommonSettings) -> FakeInstance:
        instance = FakeInstance(service, model, "g1")
        await instance.open(worker_record(model, **record), None)
        return instance

    async with host("worker", settings, start) as running:
        assert isinstance(running.app, FakeInstance)
        yield running.app


@asynccontextmanager
async def fake_kvbm(settings: CommonSettings, model: str) -> AsyncIterator[FakeInstance]:
    """A kvbm that holds blocks of one model in g2, registered."""

    async def start(service: Service, _settings: CommonSettings) -> FakeInstance:
        instance = FakeInstance(service, model, "g2")
        await instance.open(None, KvbmRecord(g2_bytes=1 << 20))
        return instance

    async with host("kvbm", settings, start) as running:
        assert isinstance(running.app, FakeInstance)
        yield running.app
