"""The life of accepted requests: deadlines, cancellation, their one terminal event. Keeps engine, table and streams in step."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.requests import OpenRequest, RequestTable, unpinned
from kvbus_worker.engines.base import Engine, EngineRequest

_LONGEST_TIMER_S = 30 * 86_400.0
"""Event loops take no timers of any length; what runs longer than this is ended, too."""


class StepOutbox(Protocol):
    """Where a frontend's share of a step goes: `kvbus_runtime.streams.sender.StepSender`."""

    def open(self, request_id: str, frontend_id: str) -> None:
        """The request is accepted: its frontend hears heartbeats from now on."""

    def discard(self, request_id: str, frontend_id: str) -> None:
        """It ends without a terminal event."""

    def forget(self, frontend_id: str) -> None:
        """The frontend is gone."""

    def add_started(self, frontend_id: str, started: Started) -> None: ...

    def add_delta(self, frontend_id: str, delta: Delta) -> None: ...

    def add_ended(self, frontend_id: str, ended: Ended) -> None: ...

    def flush(self) -> None:
        """End of a step: what was added since the last one leaves as one frame per frontend."""


class RequestRunner:
    """``changed`` is called whenever the load may have changed."""

    def __init__(
        self,
        engine: Engine,
        table: RequestTable,
        outbox: StepOutbox,
        *,
        changed: Callable[[], None],
        metrics: WorkerMetrics,
        log: Any,
    ) -> None:
        self._engine = engine
        self._table = table
        self._outbox = outbox
        self._changed = changed
        self._metrics = metrics
        self._log = log
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def table(self) -> RequestTable:
        return self._table

    def open(self, request: OpenRequest, deadline_ms: int) -> None:
        """Accept a request. Raise EngineError when there is no room."""
        self._table.open(request)
        loop = asyncio.get_running_loop()
        remaining_s = min(max(deadline_ms / 1000 - time.time(), 0.0), _LONGEST_TIMER_S)
        self._timers[request.request_id] = loop.call_later(remaining_s, self._deadline_passed, request.request_id)
        self._idle.clear()
        self._outbox.open(request.request_id, request.frontend_id)
        self._note_counts()

    def submit(self, request: OpenRequest, engine_request: EngineRequest) -> None:
        """Hand an opened request to the engine. Raise EngineError; the request is still open then."""
        self._engine.submit(engine_request)
        request.submitted = True
        self._changed()

    def reject(self, request: OpenRequest) -> None:
        """Forget a request that was opened and never accepted."""
        self._table.discard(request.request_id)
        self._outbox.discard(request.request_id, request.frontend_id)
        self._closed(request.request_id)

    def end(self, request_id: str, verdict: ErrorReply | None) -> None:
        """Cancel a request (``verdict`` None), or end it with an error. Idempotent; unknown ids are ignored."""
        request = self._table.condemn(request_id, verdict)
        if request is None:
            return
        if request.submitted:
            self._engine.cancel(request_id)
        else:
            self.end_now(request, verdict)

    def end_now(self, request: OpenRequest, verdict: ErrorReply | None) -> None:
        """Give a request its terminal event without waiting for the engine, whose later word about it is ignored."""
        closed = self._table.end_by_worker(request, verdict)
        if closed is not None:
            if request.submitted:
                self._engine.cancel(request.request_id)
            self._deliver_ended(*closed)
            self._outbox.flush()

    def end_frontend(self, frontend_id: str) -> None:
        """Nobody listens any more."""
        for request in self._table.of_frontend(frontend_id):
            self._log.info("request_abandoned", request=request.request_id, frontend=frontend_id)
            self.end(request.request_id, None)
        self._outbox.forget(frontend_id)

    def end_all_now(self, verdict: ErrorReply) -> None:
        for request in self._table:
            self.end_now(request, verdict)

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def on_started(self, started: Started) -> None:
        request = self._table.note_started(started)
        if request is not None:
            self._outbox.add_started(request.frontend_id, started)

    def on_delta(self, delta: Delta) -> None:
        now = time.monotonic()
        request = self._table.get(delta.request_id)
        if request is None:
            return
        if request.first_token_at is None:
            self._metrics.first_token_s.observe(now - request.accepted_at)
        self._table.note_delta(delta, now)
        self._outbox.add_delta(request.frontend_id, delta)

    def on_ended(self, ended: Ended) -> None:
        closed = self._table.end(ended)
        if closed is not None:
            self._deliver_ended(*closed)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _deliver_ended(self, request: OpenRequest, ended: Ended) -> None:
        if request.to_pin:
            ended = self._with_unpinned(request, ended)
        self._outbox.add_ended(request.frontend_id, ended)
        seconds = time.monotonic() - request.accepted_at
        self._metrics.note_ended(ended, seconds)
        self._log.info(
            "request",
            request=ended.request_id,
            frontend=request.frontend_id,
            reason=ended.reason,
            code=str(ended.error.code) if ended.error is not None else None,
            prompt_tokens=ended.usage.prompt_tokens,
            cached_tokens=ended.usage.cached_tokens,
            onboarded_tokens=ended.usage.onboarded_tokens,
            output_tokens=ended.usage.output_tokens,
            resumed=request.resumed,
            queue_s=round(ended.usage.queue_s, 6),
            prefill_s=round(ended.usage.prefill_s, 6),
            total_s=round(seconds, 6),
            trace=request.trace or None,
        )
        self._closed(ended.request_id)

    def _with_unpinned(self, request: OpenRequest, ended: Ended) -> Ended:
        block_size = self._engine.info.block_size
        in_g1 = self._engine.directives([key for _, key in request.to_pin])
        blocks = unpinned(request, in_g1, ended.usage.cached_tokens // block_size)
        self._metrics.unpinned.inc(blocks)
        tokens = blocks * block_size
        usage = msgspec.structs.replace(ended.usage, unpinned_tokens=tokens)
        return msgspec.structs.replace(ended, usage=usage)

    def _closed(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        if not len(self._table):
            self._idle.set()
        self._note_counts()
        self._changed()

    def _deadline_passed(self, request_id: str) -> None:
        message = "the deadline passed while the request ran"
        self.end(request_id, ErrorReply(code=ErrorCode.DEADLINE_EXCEEDED, message=message))

    def _note_counts(self) -> None:
        self._metrics.open.set(len(self._table))
        self._metrics.recent.set(self._table.recent)
