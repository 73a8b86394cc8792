"""Copies of blocks where other workers can read them: slots of the staging memory, each chunk under a lease of its reader."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvbus_runtime.errors import RequestFailed
from kvbus_transfer import Granted, LimitReached, checksum
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.transfer import BlocksReady
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.prefill_jobs import PrefillJob, PrefillJobs, StagedChunk
from kvbus_worker.engines.base import Engine, EngineError


class Staging(Protocol):
    """Memory that peers can read: `kvbus_worker.adapters.transfer.TransferLink`."""

    async def prepare(self) -> None: ...

    def view(self, slot: int) -> memoryview: ...

    def grant(self, slots: Sequence[int], lease_s: float, peer: str) -> Granted: ...

    def release(self, lease_id: int) -> None: ...


class ChunkStager:
    """``room`` is set, and replaced, whenever slots come back."""

    def __init__(
        self, engine: Engine, jobs: PrefillJobs, staging: Staging, metrics: WorkerMetrics, *, chunk_blocks: int
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._staging = staging
        self._metrics = metrics
        self._chunk_blocks = chunk_blocks
        self._staged: dict[int, tuple[PrefillJob, StagedChunk]] = {}
        self.room = asyncio.Event()

    async def prepare(self) -> None:
        """Raise ArenaError."""
        await self._staging.prepare()

    def take_slots(self, job: PrefillJob, first: int, most: int) -> tuple[int, ...]:
        """For the blocks from ``first`` on that are ready; none when none is, or there is no room."""
        # Half of the memory at most: so one chunk is read while the next one is staged.
        fair = max(1, self._jobs.slots // 2)
        count = min(job.ready - first, most, self._chunk_blocks, fair)
        return self._jobs.take_slots(count) if count > 0 else ()

    async def stage(self, job: PrefillJob, first: int, slots: tuple[int, ...]) -> BlocksReady:
        """Copy blocks to where the reader can get them. Raise RequestFailed when they are gone."""
        keys = job.keys[first : first + len(slots)]
        staged = False
        try:
            views = [self._staging.view(slot) for slot in slots]
            try:
                written = await self._engine.export_blocks(keys, views)
            except EngineError as error:
                raise RequestFailed(error.reply) from error
            count = written.index(False) if False in written else len(written)
            if not count:
                raise RequestFailed(gone("the blocks have left the worker"))
            sums = await asyncio.to_thread(lambda: tuple(map(checksum, views[:count])))
            if self._jobs.get(job.prefill_id) is not job:
                raise RequestFailed(gone("nobody waits for the blocks any more"))
            try:
                granted = self._staging.grant(slots[:count], job.lease_s, job.reader)
            except LimitReached as error:
                raise RequestFailed.of(ErrorCode.OVERLOADED, str(error), retryable=True) from error
            answer = BlocksReady(
                prefill_id=job.prefill_id,
                first=first,
                count=count,
                grant=granted.sealed,
                checksums=sums,
                done=first + count == job.end_block,
                handover=job.handover,
            )
            chunk = StagedChunk(first, count, granted.lease_id, slots[:count], answer)
            job.chunks.append(chunk)
            self._staged[chunk.lease_id] = job, chunk
            staged = True
            self._give_back(slots[count:])
            self._metrics.transfer_blocks.labels("out").inc(count)
            return answer
        finally:
            if not staged:
                self._give_back(slots)
            self.note()

    def on_lease_end(self, lease_id: int) -> None:
        """The reader has finished with a chunk, or its time is over: nothing that is read from now on counts."""
        found = self._staged.pop(lease_id, None)
        if found is not None:
            job, chunk = found
            job.chunks = [each for each in job.chunks if each is not chunk]
            self._give_back(chunk.slots)
            self.note()

    def free(self, chunk: StagedChunk) -> None:
        """End its lease; `on_lease_end` gives the slots back."""
        self._staging.release(chunk.lease_id)

    def note(self) -> None:
        self._metrics.staged_blocks.set(self._jobs.staged)

    def _give_back(self, slots: tuple[int, ...]) -> None:
        if slots:
            self._jobs.free(slots)
            room, self.room = self.room, asyncio.Event()
            room.set()


def gone(message: str) -> ErrorReply:
    return ErrorReply(code=ErrorCode.GONE, message=message, retryable=True)
