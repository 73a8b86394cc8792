"""Prompts that this worker computes for others: see `kvbus_wire.transfer` for the messages."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.serving import RequestContext
from kvbus_transfer import ArenaError
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import Message
from kvbus_wire.packing import TOKEN_BYTES, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.transfer import BlocksReady, EndPrefill, NextBlocks, PrefillStarted, StartPrefill
from kvbus_wire.worker import Done
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.admission import ModelLimits
from kvbus_worker.core.prefill_jobs import PrefillJob, PrefillJobs
from kvbus_worker.core.roles import Role
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import Engine, EngineError, EngineRequest, HandsOver, StepOutput
from kvbus_worker.handlers.chunk_stager import ChunkStager, Staging, gone
from kvbus_worker.settings import WorkerSettings

SILENT = "the reader is silent"
TRANSFER_MESSAGES = (StartPrefill, NextBlocks, EndPrefill)


class Onboarder(Protocol):
    """`kvbus_worker.adapters.kvbm.Kvbm`."""

    def can_onboard(self, keys: Sequence[bytes]) -> bool: ...

    def onboard(self, keys: Sequence[bytes], packed: bytes) -> Coroutine[Any, Any, int]: ...


class PrefillLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``lease_s``: the longest that a silent reader is waited for; ``wait_s``: the longest answer to NextBlocks."""

    lease_s: float
    wait_s: float
    chunk_blocks: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> "PrefillLimits":
        return cls(
            lease_s=settings.prefill_lease_s,
            wait_s=settings.prefill_wait_s,
            chunk_blocks=settings.prefill_chunk_blocks,
        )


class RemotePrefillHandler:
    """``changed`` is called whenever the load may have changed."""

    def __init__(
        self,
        engine: Engine,
        store: TokenStore,
        jobs: PrefillJobs,
        staging: Staging,
        model: ModelLimits,
        limits: PrefillLimits,
        kvbm: Onboarder | None,
        *,
        incarnation: int,
        spawn: Callable[..., asyncio.Task[Any]],
        changed: Callable[[], None],
        metrics: WorkerMetrics,
        log: Any,
    ) -> None:
        self._engine = engine
        self._store = store
        self.jobs = jobs
        self._stager = ChunkStager(engine, jobs, staging, metrics, chunk_blocks=limits.chunk_blocks)
        self._model = model
        self._limits = limits
        self._kvbm = kvbm
        self._incarnation = incarnation
        self._spawn = spawn
        self._changed = changed
        self._metrics = metrics
        self._log = log
        self._news: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.role: Role = Role.BOTH
        self.draining = False

    async def __call__(self, message: Message, context: RequestContext) -> Message:
        try:
            match message:
                case StartPrefill():
                    return await self._start(message)
                case NextBlocks():
                    return await self._next(message)
                case EndPrefill():
                    self._end(self.jobs.get(message.prefill_id), message.reason)
                    return Done()
        except EngineError as error:
            self._metrics.remote_prefills.labels(str(error.reply.code)).inc()
            raise RequestFailed(error.reply) from error
        raise AssertionError(f"{type(message).__name__} is no message of a remote prefill")

    def on_step(self, output: StepOutput) -> None:
        """After the token store has the step's blocks."""
        if not len(self.jobs):
            return
        for engine_id, payload in output.handovers:
            if (job := self.jobs.of_engine(engine_id)) is not None:
                job.handover = payload
                self._tell(job)
        if output.blocks:
            for job in self.jobs:
                if job.advance(self._store):
                    self._tell(job)
        for ended in output.ended:
            if (job := self.jobs.of_engine(ended.request_id)) is not None:
                job.over = True
                if self._runs_along:
                    self._end(job, "done")
                    continue
                job.failure = ended.error if ended.reason in ("stop", "length") else ended.error or _cancelled()
                self._tell(job)

    def on_lease_end(self, lease_id: int) -> None:
        self._stager.on_lease_end(lease_id)

    @property
    def _runs_along(self) -> bool:
        return isinstance(self._engine, HandsOver) and self._engine.handover_early

    async def wait_idle(self) -> None:
        """Return when nobody waits for blocks of this worker."""
        await self._idle.wait()

    def close(self) -> None:
        for job in self.jobs:
            self._end(job, "the worker ends")
        if self._timer is not None:
            self._timer.cancel()

    # Starting.

    async def _start(self, message: StartPrefill) -> PrefillStarted:
        job = self.jobs.get(message.prefill_id)
        if job is None:
            job = self._admit(message)
            try:
                if not self._engine.info.handover:
                    await self._stager.prepare()
            except ArenaError as error:
                self._end(job, "no staging memory")
                raise EngineError(ErrorCode.UNAVAILABLE, f"no memory to hand over: {error}", retryable=True) from error
            except BaseException:  # cancelled, when it took too long for whoever asked
                self._end(job, "not begun")
                raise
            if self.jobs.get(job.prefill_id) is not job:
                raise RequestFailed(gone("nobody waits for the prompt any more"))
            self._begin(job, message)
        return PrefillStarted(
            prefill_id=job.prefill_id,
            incarnation=self._incarnation,
            cached_blocks=job.cached,
            handover=job.handover,
        )

    def _admit(self, message: StartPrefill) -> PrefillJob:
        """Check, and enter it. Raise EngineError."""
        model = self._model
        if self.draining:
            raise EngineError(ErrorCode.DRAINING, "the worker takes no more work", retryable=True)
        if self.role is Role.DECODE:
            raise EngineError(ErrorCode.DRAINING, "this worker computes no prompts for others now", retryable=True)
        mine = (model.name, model.fingerprint, model.kv_layout)
        if (message.model, message.fingerprint, message.kv_layout) != mine or message.lora:
            raise EngineError(ErrorCode.UNSUPPORTED, "the blocks of this worker are of another model or layout")
        if message.handover_kind != self._engine.info.handover:
            raise EngineError(ErrorCode.UNSUPPORTED, f"no hand-over of the kind {message.handover_kind!r} here")
        needed = (message.end_block * model.block_size + 1) * TOKEN_BYTES
        if (
            not message.prefill_id
            or not message.reader
            or not 0 <= message.first_block < message.end_block
            or len(message.tokens) < needed
            or len(message.tokens) % TOKEN_BYTES
            or not message.lease_s > 0
        ):
            raise EngineError(ErrorCode.INVALID_REQUEST, "the blocks asked for are not within the tokens")
        if len(message.tokens) // TOKEN_BYTES >= model.context_length:
            raise EngineError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"the context length is {model.context_length}")
        if model.vocab_size and max(unpack_tokens(message.tokens)) >= model.vocab_size:
            raise EngineError(ErrorCode.INVALID_REQUEST, "a token is not in the vocabulary", param="tokens")
        if message.deadline_ms <= time.time_ns() // 1_000_000:
            raise EngineError(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed")
        blocks = memoryview(message.tokens)[: needed - TOKEN_BYTES]
        keys = chain_keys(self._domain_key(message), blocks, model.block_size, b"")
        lease_s = min(message.lease_s, self._limits.lease_s)
        if self._runs_along:  # nobody asks any more, and the engines know themselves when it is over
            lease_s = message.deadline_ms / 1000 - time.time()
        job = PrefillJob(
            prefill_id=message.prefill_id,
            request_id=message.request_id,
            reader=message.reader,
            keys=keys,
            first_block=message.first_block,
            lease_s=lease_s,
        )
        self.jobs.add(job)
        self._news[job.prefill_id] = asyncio.Event()
        self._idle.clear()
        self._note()
        return job

    def _domain_key(self, message: StartPrefill) -> bytes:
        return CacheDomain(
            model_fingerprint=self._model.fingerprint,
            block_size=self._model.block_size,
            kv_layout=self._model.kv_layout,
            lora=message.lora,
            salt=message.cache_salt,
        ).key()

    def _begin(self, job: PrefillJob, message: StartPrefill) -> None:
        job.lease_until = time.monotonic() + job.lease_s  # not before: until it is answered its reader can say nothing
        self._watch()
        job.advance(self._store)
        job.cached = job.ready
        request = EngineRequest(
            request_id=job.engine_id,
            # One token more than the blocks: so the last block need not be computed again where it is cached.
            tokens=unpack_tokens(message.tokens[: (job.end_block * self._model.block_size + 1) * TOKEN_BYTES]),
            domain_key=self._domain_key(message),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1, ignore_eos=True),
            priority=message.hints.effective_priority,
            strict_priority=message.hints.strict_priority,
            prefill_only=True,
            handover=message.handover,
        )
        if self._kvbm is not None and job.ready < job.end_block and self._kvbm.can_onboard(job.keys):
            work = self._onboard_and_submit(self._kvbm, job, request, message.tokens)
            self._spawn(work, name=f"onboard {job.engine_id}")
        else:
            self._submit(job, request)

    async def _onboard_and_submit(
        self, kvbm: Onboarder, job: PrefillJob, request: EngineRequest, packed: bytes
    ) -> None:
        await kvbm.onboard(job.keys, packed)
        if self.jobs.get(job.prefill_id) is not job:
            return
        job.advance(self._store)
        job.cached = max(job.cached, job.ready)
        try:
            self._submit(job, request)
        except EngineError as error:
            job.over, job.failure = True, error.reply
            self._tell(job)

    def _submit(self, job: PrefillJob, request: EngineRequest) -> None:
        """Raise EngineError; the job is gone then. Also where all is cached: the engine holds the blocks meanwhile."""
        try:
            self._engine.submit(request)
        except EngineError:
            self._end(job, "refused by the engine")
            raise
        job.submitted = True
        self._changed()

    # Handing over.

    async def _next(self, message: NextBlocks) -> BlocksReady:
        job = self._asked(message)
        job.advance(self._store)
        for chunk in job.take_read(message.received):
            self._stager.free(chunk)
        if (known := job.chunk_at(message.first)) is not None:
            return known.answer
        if not job.first_block <= message.first <= job.end_block or message.most < 1:
            raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "no such blocks", param="first")
        loop = asyncio.get_running_loop()
        until = loop.time() + min(message.wait_s, self._limits.wait_s)
        while True:
            moves = not self._engine.info.handover
            slots = self._stager.take_slots(job, message.first, message.most) if moves else ()
            if slots:
                try:
                    return await self._stager.stage(job, message.first, slots)
                except RequestFailed as failure:
                    if failure.code is not ErrorCode.GONE or job.over or self.jobs.get(job.prefill_id) is not job:
                        raise
                    # Cached blocks have left before the engine came to the prompt: it will compute them.
                    job.ready = message.first
            if not moves and job.over and job.failure is None:
                return BlocksReady(
                    prefill_id=job.prefill_id, first=message.first, count=0, done=True, handover=job.handover
                )
            if job.over and job.ready <= message.first:
                raise RequestFailed(job.failure or gone("the blocks were not computed to the end"))
            if not await self._wait(job, until):
                return BlocksReady(prefill_id=job.prefill_id, first=message.first, count=0)
            self._asked(message)

    def _asked(self, message: NextBlocks) -> PrefillJob:
        job = self.jobs.get(message.prefill_id)
        if job is None:
            raise RequestFailed(gone("nobody computes this prompt here any more"))
        job.lease_until = time.monotonic() + job.lease_s
        return job

    async def _wait(self, job: PrefillJob, until: float) -> bool:
        """For news of the job, or for room. False when the time is over."""
        news, room = self._news[job.prefill_id], self._stager.room
        waits = [asyncio.ensure_future(news.wait()), asyncio.ensure_future(room.wait())]
        try:
            left = until - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return bool(done)

    # Ending.

    def _end(self, job: PrefillJob | None, reason: str) -> None:
        """Idempotent."""
        if job is None or self.jobs.get(job.prefill_id) is not job:
            return
        for chunk in self.jobs.remove(job):
            self._stager.free(chunk)
        if job.submitted and not job.over:
            self._engine.cancel(job.engine_id)
        news = self._news.pop(job.prefill_id, None)
        if news is not None:
            news.set()
        outcome = {"done": "done", SILENT: "expired"}.get(reason, "ended")
        self._metrics.remote_prefills.labels(outcome).inc()
        self._log.info(
            "remote_prefill",
            request=job.request_id,
            reader=job.reader,
            reason=reason,
            blocks=job.end_block,
            cached_blocks=job.cached,
            ready_blocks=job.ready,
        )
        if not len(self.jobs):
            self._idle.set()
        self._note()
        self._changed()

    def _tell(self, job: PrefillJob) -> None:
        news = self._news.get(job.prefill_id)
        if news is not None:
            self._news[job.prefill_id] = asyncio.Event()
            news.set()

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (due := self.jobs.next_due()) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(due - time.monotonic(), 0.01), self._look_for_silent)

    def _look_for_silent(self) -> None:
        for job in self.jobs.silent(time.monotonic()):
            self._end(job, SILENT)
        self._watch()

    def _note(self) -> None:
        self._metrics.remote_prefills_open.set(len(self.jobs))
        self._stager.note()


def _cancelled() -> ErrorReply:
    return ErrorReply(code=ErrorCode.CANCELLED, message="the prefill was cancelled", retryable=True)
