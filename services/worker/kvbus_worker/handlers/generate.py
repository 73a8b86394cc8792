"""Generate: check, find the prefix, onboard what kvbm has, hand over to the engine."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.serving import RequestContext
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import Message
from kvbus_wire.worker import Accepted, Generate, NeedTokens, Prefetch
from kvbus_worker.adapters.kvbm import Kvbm
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.remote_prefill import Bringing, RemotePrefiller
from kvbus_worker.core.admission import Admitted, ModelLimits, PrefixGone, admit
from kvbus_worker.core.requests import OpenRequest
from kvbus_worker.core.retention import pinned_positions
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.said import Said
from kvbus_worker.handlers.prefetch import PrefetchHandler
from kvbus_worker.handlers.runner import RequestRunner


class GenerateHandler:
    """Idempotent by request id and ``resumed``. A request is in the table before the first await, so twins meet it there."""

    def __init__(
        self,
        runner: RequestRunner,
        store: TokenStore,
        limits: ModelLimits,
        kvbm: Kvbm | None,
        *,
        prefetch: PrefetchHandler,
        remote: RemotePrefiller | None = None,
        incarnation: int,
        spawn: Callable[..., asyncio.Task[Any]],
        metrics: WorkerMetrics,
        log: Any,
    ) -> None:
        self._runner = runner
        self._store = store
        self._limits = limits
        self._kvbm = kvbm
        self._prefetch = prefetch
        self._remote = remote
        self._incarnation = incarnation
        self._spawn = spawn
        self._metrics = metrics
        self._log = log
        self.draining = False

    async def __call__(self, message: Generate | Prefetch, context: RequestContext) -> Message:
        try:
            if isinstance(message, Prefetch):
                self._check_open()
                return await self._prefetch(message)
            return self._accept(message)
        except EngineError as error:
            self._metrics.refused.labels(str(error.reply.code)).inc()
            raise RequestFailed(error.reply) from error

    def _accept(self, message: Generate) -> Message:
        if self._runner.table.is_known(message.request_id, message.resumed):
            self._metrics.repeated.inc()
            return Accepted(request_id=message.request_id, incarnation=self._incarnation)
        self._check_open()
        stale = self._runner.table.get(message.request_id)
        if stale is not None:
            # The request migrated away, and has come back while its first attempt still runs here: nobody reads that one.
            self._runner.end(message.request_id, None)
        self._runner.table.check_room(message.request_id)
        try:
            admitted = admit(message, self._limits, self._store, time.time_ns() // 1_000_000, time.monotonic())
        except PrefixGone:
            self._metrics.need_tokens.inc()
            return NeedTokens(request_id=message.request_id)
        request = OpenRequest(
            request_id=message.request_id,
            frontend_id=message.frontend_id,
            prompt_tokens=len(admitted.request.tokens) - message.resumed,
            resumed=message.resumed,
            accepted_at=time.monotonic(),
            trace=message.trace,
        )
        self._runner.open(request, message.deadline_ms)
        if admitted.request.directives:
            self._retain(request, admitted)
        kvbm = self._kvbm if self._kvbm is not None and self._kvbm.can_onboard(admitted.keys) else None
        bringing = self._remote.begin(message, admitted) if self._remote is not None else None
        if kvbm is not None or bringing is not None:
            work = self._bring_and_submit(kvbm, bringing, request, admitted)
            task = self._spawn(work, name=f"onboard {request.request_id}")
            if bringing is not None:
                request.abandon = partial(self._abandon, bringing, task)
        else:
            try:
                self._runner.submit(request, admitted.request)
            except EngineError:
                self._runner.reject(request)
                raise
        return Accepted(request_id=message.request_id, incarnation=self._incarnation)

    def _check_open(self) -> None:
        if self.draining:
            raise EngineError(ErrorCode.DRAINING, "the worker takes no more work", retryable=True)

    def _retain(self, request: OpenRequest, admitted: Admitted) -> None:
        """What is said of blocks goes to kvbm with each use, beside the request's own way."""
        runs = admitted.request.directives
        request.to_pin = tuple((i, admitted.keys[i]) for i in pinned_positions(runs, len(admitted.keys)))
        if self._kvbm is not None:
            self._spawn(self._retain_below(self._kvbm, request, admitted), name=f"retain {request.request_id}")

    async def _retain_below(self, kvbm: Kvbm, request: OpenRequest, admitted: Admitted) -> None:
        request.unpinned_below = await kvbm.retain(admitted.keys, admitted.request.directives)

    def _abandon(self, bringing: Bringing, task: asyncio.Task[Any]) -> None:
        """The request has ended before it was submitted. A task that has not begun would not close what it never saw."""
        task.cancel()
        if self._remote is not None:
            self._remote.close(bringing)

    async def _bring_and_submit(
        self,
        kvbm: Kvbm | None,
        bringing: Bringing | None,
        request: OpenRequest,
        admitted: Admitted,
    ) -> None:
        engine_request, onboarded = admitted.request, 0
        if kvbm is not None:
            said = Said(engine_request.directives)
            onboarded = await kvbm.onboard(admitted.keys, admitted.packed, said)
        if bringing is not None and self._remote is not None:
            brought = await self._remote.bring(bringing)
            request.abandon = None
            request.prefill_worker_id, request.computed_elsewhere = brought.worker_id, brought.computed
            onboarded += brought.tokens - brought.computed
            engine_request = msgspec.structs.replace(engine_request, handover=brought.handover)
        if self._runner.table.get(request.request_id) is not request:
            return  # it was cancelled meanwhile, and has had its terminal event
        try:
            self._runner.submit(request, msgspec.structs.replace(engine_request, onboarded_tokens=onboarded))
        except EngineError as error:
            self._runner.end_now(request, error.reply)
        except Exception as error:
            self._log.exception("submit_failed", request=request.request_id)
            text = f"{type(error).__name__} in the engine"
            self._runner.end_now(request, ErrorReply(code=ErrorCode.INTERNAL, message=text, retryable=True))
