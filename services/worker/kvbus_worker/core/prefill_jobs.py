"""Prompts that this worker computes for others: which of their blocks are computed, which lie where peers can read them, and until
when. Pure: the clock is passed in.

    block    0 ......... first_block ............ ready ............ end_block
             not asked   computed; staged chunk by chunk as asked   not computed yet

A staged chunk holds slots of the staging memory under a lease of the transfer agent, until its reader says that it has it, asks
for nothing any more, or is silent for the job's lease. Slots are free again only after their lease has ended.
"""

import math
from collections.abc import Container, Iterator

import msgspec

from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.transfer import BlocksReady
from kvbus_worker.engines.base import EngineError


class StagedChunk(msgspec.Struct, frozen=True):
    first: int
    count: int
    lease_id: int
    slots: tuple[int, ...]
    answer: BlocksReady

    @property
    def end(self) -> int:
        return self.first + self.count


class PrefillJob(msgspec.Struct, kw_only=True, eq=False):
    """``ready``: so many leading blocks are computed, or were there. ``submitted``: the engine has it. ``over``: it computes no
    more for it; ``failure``: since that went wrong. ``handover``: what an engine that moves blocks itself has said."""

    prefill_id: str
    request_id: str
    reader: str
    keys: list[bytes]
    first_block: int
    lease_s: float
    lease_until: float = math.inf
    cached: int = 0
    ready: int = 0
    submitted: bool = False
    over: bool = False
    failure: ErrorReply | None = None
    handover: bytes = b""
    chunks: list[StagedChunk] = msgspec.field(default_factory=list)

    @property
    def engine_id(self) -> str:
        return f"{self.prefill_id}|prefill"

    @property
    def end_block(self) -> int:
        return len(self.keys)

    def advance(self, present: Container[bytes]) -> bool:
        """More blocks may be in G1; whether there are."""
        before = self.ready
        while self.ready < len(self.keys) and self.keys[self.ready] in present:
            self.ready += 1
        return self.ready > before

    def chunk_at(self, first: int) -> StagedChunk | None:
        return next((chunk for chunk in self.chunks if chunk.first == first), None)

    def take_read(self, received: int) -> list[StagedChunk]:
        """The chunks that the reader has."""
        read = [chunk for chunk in self.chunks if chunk.end <= received]
        self.chunks = [chunk for chunk in self.chunks if chunk.end > received]
        return read


class PrefillJobs:
    """At most ``limit`` jobs; ``slots``: of the staging memory, one block each."""

    def __init__(self, *, limit: int, slots: int) -> None:
        self._limit = limit
        self.slots = slots
        self._jobs: dict[str, PrefillJob] = {}
        self._engine_ids: dict[str, PrefillJob] = {}
        self._free = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[PrefillJob]:
        return iter(list(self._jobs.values()))

    @property
    def staged(self) -> int:
        """Slots that are taken. Zero when nothing is under way, or something leaks."""
        return self.slots - len(self._free)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(job.request_id for job in self._jobs.values())

    def get(self, prefill_id: str) -> PrefillJob | None:
        return self._jobs.get(prefill_id)

    def of_engine(self, engine_id: str) -> PrefillJob | None:
        return self._engine_ids.get(engine_id)

    def add(self, job: PrefillJob) -> None:
        """Raise EngineError at the limit."""
        if len(self._jobs) >= self._limit:
            raise EngineError(
                ErrorCode.OVERLOADED,
                "too many prompts are computed for others",
                retryable=True,
                max_remote_prefills=self._limit,
            )
        self._jobs[job.prefill_id] = job
        self._engine_ids[job.engine_id] = job

    def remove(self, job: PrefillJob) -> list[StagedChunk]:
        """Its chunks are to be given up (`free`). Idempotent."""
        self._jobs.pop(job.prefill_id, None)
        self._engine_ids.pop(job.engine_id, None)
        chunks, job.chunks = job.chunks, []
        return chunks

    def take_slots(self, most: int) -> tuple[int, ...]:
        count = min(most, len(self._free))
        return tuple(self._free.pop() for _ in range(count))

    def free(self, slots: tuple[int, ...]) -> None:
        self._free.extend(slots)

    def silent(self, now: float) -> list[PrefillJob]:
        """Those whose reader has not asked for their lease."""
        return [job for job in self._jobs.values() if job.lease_until <= now]

    def next_due(self) -> float | None:
        due = min((job.lease_until for job in self._jobs.values()), default=math.inf)
        return due if due < math.inf else None

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken (a chunk that is being staged holds slots that no job shows)."""
        held = [slot for job in self._jobs.values() for chunk in job.chunks for slot in chunk.slots]
        if len(set(held)) != len(held) or set(held) & set(self._free) or len(set(self._free)) != len(self._free):
            raise AssertionError("a slot is taken twice")
        if len(held) + len(self._free) > self.slots:
            raise AssertionError("more slots than there are")
        if {job.engine_id: job for job in self._jobs.values()} != self._engine_ids:
            raise AssertionError("a job is lost")
