"""Having a prompt computed by another worker: its blocks are read and imported chunk by chunk while it computes the next.

Whatever fails here costs a recompute and a metric, never a request: what has come is in G1, the rest is computed here.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_transfer import LimitReached, TransferError, checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import TOKEN_BYTES
from kvbus_wire.transfer import BlocksReady, EndPrefill, NextBlocks, PrefillStarted, StartPrefill
from kvbus_wire.worker import Done, Generate, RemotePrefill
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.scratch import Scratch
from kvbus_worker.adapters.transfer import Reader
from kvbus_worker.core.admission import Admitted, ModelLimits
from kvbus_worker.core.onboard_rates import OnboardRates
from kvbus_worker.core.pulls import Coming
from kvbus_worker.engines.base import Engine, EngineError, HandsOver
from kvbus_worker.engines.said import Said
from kvbus_worker.settings import WorkerSettings

SOURCE = "remote"
_CHUNKS_KEPT = 2
_NEW = 0.2  # weight of the newest observation of the hand-over's time

Spawn = Callable[..., asyncio.Task[Any]]


class PullLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``stall_s``: so long nothing may come; ``min_blocks``: fewer are not worth asking for; ``parallel``: pulls at a time.
    ``rest_s``: a worker that could not be reached is left alone for so long; ``forget_s``: what was measured counts for so long."""

    request_timeout_s: float
    stall_s: float
    lease_s: float
    wait_s: float
    chunk_blocks: int
    min_blocks: int
    parallel: int
    rest_s: float
    forget_s: float

    @classmethod
    def of(cls, settings: WorkerSettings) -> "PullLimits":
        return cls(
            request_timeout_s=settings.prefill_timeout_s,
            stall_s=settings.prefill_stall_s,
            lease_s=settings.prefill_lease_s,
            wait_s=settings.prefill_wait_s,
            chunk_blocks=settings.prefill_chunk_blocks,
            min_blocks=settings.prefill_min_blocks,
            parallel=settings.prefill_parallel,
            rest_s=settings.prefill_rest_s,
            forget_s=settings.prefill_forget_s,
        )


class Brought(msgspec.Struct, frozen=True):
    """``tokens`` came; ``computed`` of them were computed for this request, the others were cached there. ``worker_id``: who had
    them (empty: nothing came). ``handover``: for an engine that moves blocks itself."""

    tokens: int = 0
    computed: int = 0
    worker_id: str = ""
    handover: bytes = b""


class Bringing(msgspec.Struct, eq=False):
    """What `RemotePrefiller.begin` has decided: to wait for blocks that come for others, and with ``prefill`` to have the rest
    computed there. ``promised``: keys that others may wait for because of it."""

    number: int
    message: Generate
    admitted: Admitted
    prefill: RemotePrefill | None
    promised: tuple[bytes, ...]


class _Pull(msgspec.Struct, eq=False):
    """``at``: the next block to ask for."""

    prefill_id: str
    worker_id: str
    number: int
    at: int
    imported: int = 0
    cached_there: int = 0
    handover: bytes = b""


class _GivenUp(Exception):
    """Of what is left nothing comes. ``outcome``: for the metric; ``unreachable``: the other worker did not answer."""

    def __init__(self, outcome: str, detail: str, *, unreachable: bool = False) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.unreachable = unreachable


class RemotePrefiller:
    """All methods run on the loop."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        reader: Reader,
        model: ModelLimits,
        limits: PullLimits,
        *,
        instance_id: str,
        spawn: Spawn,
        metrics: WorkerMetrics,
        log: Any,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._reader = reader
        self._model = model
        self._limits = limits
        self._instance_id = instance_id
        self._spawn = spawn
        self._metrics = metrics
        self._log = log
        self._block_bytes = engine.info.block_bytes
        self._size = engine.info.block_size * TOKEN_BYTES
        self._scratch = Scratch(limits.chunk_blocks * self._block_bytes, keep=_CHUNKS_KEPT)
        self._coming = Coming(asyncio.Event)
        self._open = 0
        self._resting: dict[str, float] = {}
        self._rates = OnboardRates()
        self._handover_s = 0.0
        self._measured_at = 0.0

    @property
    def rates(self) -> dict[str, float]:
        """For the routers. What was measured long ago is forgotten: else one slow transfer would make them choose no other worker,
        and nothing would be measured ever again."""
        self._forget()
        return self._rates.tokens_per_s

    @property
    def handover_s(self) -> float:
        """The same: 0 where nothing is known."""
        self._forget()
        return self._handover_s

    def _forget(self) -> None:
        if asyncio.get_running_loop().time() - self._measured_at > self._limits.forget_s:
            self._rates, self._handover_s = OnboardRates(), 0.0

    def begin(self, message: Generate, admitted: Admitted) -> Bringing | None:
        """Whether blocks of it come, for another request, or should for this one; None: it is computed here. Call `bring` next, and
        `close` in any case. From now on other requests wait for what it brings."""
        keys = admitted.keys
        have, number = self._engine.cached_blocks(keys), self._coming.number()
        shared = self._coming.shared(keys, have, number)
        prefill = message.prefill if self._may_ask(message, len(keys) - shared) else None
        if prefill is None and shared == have:
            return None
        if shared > have:
            self._metrics.pull_waits.inc()
        # Blocks that engines move themselves are never seen here.
        promised = tuple(keys[shared:]) if prefill is not None and not self._engine.info.handover else ()
        self._coming.begin(number, promised)
        return Bringing(number, message, admitted, prefill, promised)

    def close(self, bringing: Bringing) -> None:
        """Idempotent."""
        self._coming.end(bringing.number, bringing.promised)

    def _may_ask(self, message: Generate, blocks: int) -> bool:
        if message.prefill is None or message.prefill.worker_id == self._instance_id:
            return False
        if blocks < self._limits.min_blocks:
            return False
        if asyncio.get_running_loop().time() < self._resting.get(message.prefill.worker_id, 0.0):
            self._metrics.pulls.labels("resting").inc()
            return False
        if self._open >= self._limits.parallel:
            self._metrics.pulls.labels("skipped").inc()
            return False
        return True

    async def bring(self, bringing: Bringing) -> Brought:
        """Never raises but for cancellation: what does not come is computed here."""
        try:
            await self._wait_for_others(bringing)
            return await self._bring(bringing)
        finally:
            self.close(bringing)

    def _rest(self, worker_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._resting = {worker: until for worker, until in self._resting.items() if until > now}
        self._resting[worker_id] = now + self._limits.rest_s

    async def _wait_for_others(self, bringing: Bringing) -> None:
        """Until no earlier pull brings the next block. Each round waits for one key, until that one has come or does not: it cannot
        go on for longer than the pulls do."""
        keys = bringing.admitted.keys
        while True:
            have = self._engine.cached_blocks(keys)
            shared = self._coming.shared(keys, have, bringing.number)
            if shared == have:
                return
            await self._coming.signal(keys[shared - 1]).wait()

    async def _bring(self, bringing: Bringing) -> Brought:
        message, admitted, prefill = bringing.message, bringing.admitted, bringing.prefill
        have = self._engine.cached_blocks(admitted.keys)
        if prefill is None or len(admitted.keys) - have < self._limits.min_blocks:
            return Brought()
        prefill_id = f"{message.request_id}.{secrets.token_hex(8)}"
        pull = _Pull(prefill_id, prefill.worker_id, bringing.number, have)
        outcome = "cancelled"
        self._open += 1
        self._metrics.pulls_open.set(self._open)
        try:
            await self._pull(pull, prefill, message, admitted)
            outcome = "done"
        except _GivenUp as given_up:
            outcome, pull.handover = given_up.outcome, b""
            if given_up.unreachable:
                self._rest(pull.worker_id)
            self._log.warning(
                "remote_prefill_given_up",
                request=message.request_id,
                worker=pull.worker_id,
                outcome=outcome,
                reason=str(given_up),
                blocks=pull.imported,
            )
        finally:
            self._open -= 1
            self._metrics.pulls_open.set(self._open)
            self._metrics.pulls.labels(outcome).inc()
            self._later(self._end(pull, outcome), "remote prefill end")
        tokens = pull.imported * self._model.block_size
        cached = max(0, min(pull.cached_there, have + pull.imported) - have) * self._model.block_size
        return Brought(tokens, tokens - cached, pull.worker_id if tokens or pull.handover else "", pull.handover)

    async def _pull(self, pull: _Pull, prefill: RemotePrefill, message: Generate, admitted: Admitted) -> None:
        started = await self._start(pull, prefill, message, admitted)
        pull.cached_there = started.cached_blocks
        if self._engine.info.handover:
            await self._hand_over(pull, started)
            return
        end = len(admitted.keys)
        coming = self._ask_for(pull, pull.at, pull.at)
        try:
            while pull.at < end:
                ready = await coming
                if ready.first != pull.at or not 0 < ready.count <= min(end - pull.at, self._limits.chunk_blocks):
                    raise _GivenUp("bad_answer", f"{ready.count} blocks from {ready.first} on")
                behind = pull.at + ready.count
                if behind < end:
                    coming = self._ask_for(pull, behind, pull.at)
                await self._take(pull, ready, admitted)
        finally:
            coming.cancel()

    async def _start(
        self, pull: _Pull, prefill: RemotePrefill, message: Generate, admitted: Admitted
    ) -> PrefillStarted:
        loop = asyncio.get_running_loop()
        end = len(admitted.keys)
        engine, payload = self._engine, b""
        try:
            if isinstance(engine, HandsOver):
                payload = pull.handover = engine.prefill_payload(admitted.request)
        except EngineError as error:
            raise _GivenUp("handover", str(error)) from error
        request = StartPrefill(
            prefill_id=pull.prefill_id,
            request_id=message.request_id,
            model=message.model,
            fingerprint=self._model.fingerprint,
            kv_layout=self._model.kv_layout,
            reader=self._instance_id,
            tokens=admitted.packed[: end * self._size + TOKEN_BYTES],
            first_block=pull.at,
            end_block=end,
            deadline_ms=message.deadline_ms,
            lease_s=self._limits.lease_s,
            cache_salt=message.cache_salt,
            lora=message.lora,
            hints=message.hints,
            trace=message.trace,
            handover_kind=self._engine.info.handover,
            handover=payload,
        )
        asked_at = loop.time()
        started: PrefillStarted = await self._ask(
            pull, request, PrefillStarted, self._limits.request_timeout_s, parts=True
        )
        if started.incarnation != prefill.incarnation:
            self._log.info("prefill_worker_restarted", worker=pull.worker_id)
        # One round trip to begin with, another one for the last chunk, which no computing hides.
        took_s = 2 * (loop.time() - asked_at)
        known_s = self.handover_s
        self._handover_s = known_s + (took_s - known_s) * (_NEW if known_s else 1.0)
        self._measured_at = loop.time()
        return started

    def _ask_for(self, pull: _Pull, first: int, received: int) -> "asyncio.Task[BlocksReady]":
        task = asyncio.create_task(self._next(pull, first, received), name=f"next blocks {pull.prefill_id}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the pull may have ended before it
        return task

    async def _next(self, pull: _Pull, first: int, received: int) -> BlocksReady:
        """The chunk from block ``first`` on; what lies before ``received`` may go. Raise _GivenUp when nothing comes for too
        long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stall_s
        while True:
            wait_s = min(self._limits.wait_s, max(0.0, until - loop.time()))
            request = NextBlocks(
                prefill_id=pull.prefill_id,
                first=first,
                most=self._limits.chunk_blocks,
                received=received,
                wait_s=wait_s,
            )
            ready: BlocksReady = await self._ask(pull, request, BlocksReady, wait_s + self._limits.request_timeout_s)
            if ready.count or ready.done:
                return ready
            if loop.time() >= until:
                raise _GivenUp("stalled", f"no block came for {self._limits.stall_s:g} s")
            received = max(received, pull.at)

    async def _take(self, pull: _Pull, ready: BlocksReady, admitted: Admitted) -> None:
        """Read a chunk and import it. Only whole blocks whose checksums hold are ever imported."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        memory = self._scratch.take()
        blocks = [memory[i * self._block_bytes : (i + 1) * self._block_bytes] for i in range(ready.count)]
        try:
            backend = await self._reader.read(
                ready.grant,
                range(ready.count),
                blocks,
                deadline_s=self._limits.lease_s,
                layout=self._model.kv_layout,
            )
        except (TransferError, ValueError) as error:
            mine = isinstance(error, LimitReached) and error.own
            lost = isinstance(error, TransferError) and error.retryable and not mine
            raise _GivenUp(getattr(error, "code", "bad_grant"), str(error), unreachable=lost) from error
        self._later(self._finish(ready.grant), "remote prefill chunk read")
        if ready.checksums and not await asyncio.to_thread(_hold, blocks, ready.checksums):
            raise _GivenUp("corrupt", "the checksum of a block does not hold")
        first, end = pull.at, pull.at + ready.count
        tokens = [admitted.packed[i * self._size : (i + 1) * self._size] for i in range(first, end)]
        parent = admitted.keys[first - 1] if first else ROOT
        try:
            said = Said(admitted.request.directives).of(first, end)
            imported = await self._engine.import_blocks(parent, admitted.keys[first:end], tokens, blocks, said)
        except EngineError as error:
            raise _GivenUp("not_imported", str(error)) from error
        self._scratch.give_back(memory)
        took_s = loop.time() - began
        pull.at += imported
        pull.imported += imported
        self._coming.end(pull.number, admitted.keys[first : first + imported])
        self._metrics.transfer_blocks.labels("in").inc(imported)
        self._metrics.transfer_bytes.labels(backend).inc(ready.count * self._block_bytes)
        self._metrics.transfer_seconds.inc(took_s)
        self._forget()
        self._rates.observe(SOURCE, imported * self._model.block_size, took_s)
        self._measured_at = loop.time()
        if imported < ready.count:
            raise _GivenUp("no_room", "there is no room for the blocks here")

    async def _hand_over(self, pull: _Pull, started: PrefillStarted) -> None:
        """The engines move the blocks; only what they say to each other comes this way."""
        pull.handover = started.handover or pull.handover
        if isinstance(self._engine, HandsOver) and self._engine.handover_early:
            return
        ready = await self._next(pull, pull.at, pull.at)
        pull.handover = ready.handover or pull.handover

    async def _ask(self, pull: _Pull, request: Any, reply: type[Any], timeout_s: float, *, parts: bool = False) -> Any:
        subject = self._bus.subjects.transfer(pull.worker_id)
        try:
            return await self._bus.request(subject, request, reply, timeout_s=timeout_s, in_parts=parts)
        except RequestFailed as failure:
            lost = failure.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)
            raise _GivenUp(str(failure.code), failure.reply.message, unreachable=lost) from failure

    async def _finish(self, grant: bytes) -> None:
        with suppress(TransferError):  # the next question, or the end, says the same
            await self._reader.finish(grant)

    async def _end(self, pull: _Pull, outcome: str) -> None:
        if pull.handover and outcome == "done" and isinstance(self._engine, HandsOver) and self._engine.handover_early:
            return  # it computes still; its end, or its lease, is the engines' affair
        try:
            subject = self._bus.subjects.transfer(pull.worker_id)
            request = EndPrefill(prefill_id=pull.prefill_id, reason=outcome)
            await self._bus.request(subject, request, Done, timeout_s=self._limits.request_timeout_s)
        except RequestFailed as failure:
            if failure.code is not ErrorCode.UNAVAILABLE:  # who is gone holds nothing
                self._log.info("remote_prefill_not_ended", worker=pull.worker_id, reason=str(failure))

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            self._spawn(work, name=name)
        except RuntimeError:  # the service ends and takes no more tasks: the lease cleans up after it
            work.close()


def _hold(blocks: list[memoryview], checksums: tuple[int, ...]) -> bool:
    if len(checksums) != len(blocks):
        return False
    return all(checksum(block) == value for block, value in zip(blocks, checksums, strict=True))
