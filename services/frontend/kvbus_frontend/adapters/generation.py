"""One choice from the router's decision to its last token, over as many workers as it takes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import msgspec

from kvbus_frontend.core.attempts import GapInOutput, Progression
from kvbus_frontend.core.dispatch import Job, asked_pins, generate_message, known_blocks, route_request
from kvbus_frontend.core.failures import api_error
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.errors import ApiError
from kvbus_runtime.bus import Bus, RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.streams.receiver import StepReceiver, StreamLost, StreamOverflow
from kvbus_runtime.streams.stream import StepStream
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, TokenLogprob
from kvbus_wire.router import Placement, Progress, RouteExplanation
from kvbus_wire.worker import Accepted, Cancel, Done, Generate, NeedTokens

CONTROL_TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 2.0

OnRest = Callable[[Job, Sequence[int]], None]
"""Told of a job of a session that was ended from here, with all that the worker has said by then."""


def nobody_hears(job: Job, output: Sequence[int]) -> None: ...


class Placed(msgspec.Struct, frozen=True):
    """``explanation``: where the job asked for it."""

    worker_id: str
    explanation: RouteExplanation | None


class Begun(msgspec.Struct, frozen=True):
    """``prefill_worker_id``: who computed the prompt (empty: the worker itself)."""

    cached_tokens: int
    prefill_worker_id: str = ""


class Tokens(msgspec.Struct, frozen=True):
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]


class Finished(msgspec.Struct, frozen=True):
    """``reason``: stop or length, or cancelled for one that was called off. ``unpinned_tokens`` of the prompt were to be kept and
    are not; what nobody tells counts as not kept."""

    reason: str
    stop_token_id: int | None
    unpinned_tokens: int = 0


Event = Placed | Begun | Tokens | Finished


class Spawn(Protocol):
    def __call__(self, coro: Coroutine[Any, Any, None], *, name: str) -> "asyncio.Task[None]": ...


class _Lost(Exception):
    """This attempt is over, the choice may go on. ``worker_id``: where it was."""

    def __init__(self, worker_id: str, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.worker_id = worker_id
        self.reply = reply


class Generator:
    """Routes, dispatches, receives, and moves on when a worker fails."""

    def __init__(
        self,
        bus: Bus,
        receiver: StepReceiver,
        frontend_id: str,
        settings: FrontendSettings,
        metrics: Metrics,
        log: Any,
        spawn: Spawn,
    ) -> None:
        self._bus = bus
        self._receiver = receiver
        self._frontend_id = frontend_id
        self._settings = settings
        self._log = log
        self._spawn = spawn
        self._farewells: set[asyncio.Task[None]] = set()
        self.on_rest: OnRest = nobody_hears
        self._migrations = metrics.counter("migrations", "choices that moved to another worker", ("reason",))
        self._cancels = metrics.counter("cancels", "cancellations sent to workers", ("reason",))
        self._rests_cut = metrics.counter(
            "rests_cut", "streams of sessions that were told to stop, and were not heard to their end"
        )
        self._resent = metrics.counter("prefix_misses", "workers that asked for all tokens of a prompt")

    async def run(
        self, job: Job, reason: Callable[[], str], called_off: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Event, None]:
        """The events of a choice, `Finished` last. Raise ApiError.

        Close it (``aclosing``) when no more is wanted: the worker is told then, with ``reason()``, and the router that the
        request is over. Or let ``called_off()`` be true, and go on: the worker is told at the next event, and what it says of its
        end is the last one. The caller bounds the time.
        """
        state = Progression(job, 0 if job.speculative else self._settings.migration_limit)
        while True:
            try:
                async with aclosing(self._attempt(state, reason, called_off)) as events:
                    async for event in events:
                        yield event
                return
            except _Lost as lost:
                if not state.can_move_on(lost.reply):
                    raise api_error(lost.reply) from lost
                self._migrations.labels(str(lost.reply.code)).inc()
                self._log.warning(
                    "request_moves_on",
                    request=job.request_id,
                    worker=lost.worker_id,
                    code=str(lost.reply.code),
                    reason=lost.reply.message,
                    output_tokens=len(state.output),
                )
                state.move_on(lost.worker_id, lost.reply)
                if lost.reply.code is ErrorCode.NO_WORKERS:
                    await asyncio.sleep(self._pause(state.attempt))
            if state.is_complete:
                yield Finished("length", None, asked_pins(job))
                return

    async def _attempt(
        self, state: Progression, reason: Callable[[], str], called_off: Callable[[], bool]
    ) -> AsyncGenerator[Event, None]:
        job, request_id = state.job, state.request_id
        prompt = state.prompt()
        worker_id = ""
        over, cause, accepted = False, "", False
        try:
            placement = await self._place(state, prompt)
            worker_id = placement.worker_id
            yield Placed(worker_id, placement.explanation)
            stream = self._receiver.open(request_id, worker_id, placement.incarnation)
            try:
                async with stream.unless_failed():
                    await self._dispatch(state, prompt, placement)
                accepted = True
                async for item in stream:
                    if isinstance(item, Ended):
                        over = True
                        yield self._ended(item, worker_id)
                        return
                    if (event := self._progress(state, item)) is not None:
                        yield event
                        if called_off():
                            cause = reason()
                            finished = await self._end_of_called_off(state, stream, worker_id, cause)
                            over = True  # the worker has been told
                            yield finished
                            return
                raise _Lost(worker_id, _unavailable("the stream has ended without an end"))
            except (StreamLost, GapInOutput) as problem:
                cause = "stream_lost"
                raise _Lost(worker_id, _unavailable(str(problem))) from problem
            except StreamOverflow as problem:
                cause = "stream_overflow"
                raise ApiError(500, f"The frontend is too slow: {problem}.", code="stream_overflow") from problem
            finally:
                if accepted and job.session is not None and not (over or cause):
                    self._later(self._hear_rest(state, stream), "rest of a stream")
                else:
                    stream.close()
        finally:
            self._say_farewell(job.model, request_id, worker_id, "" if over else cause or reason(), len(state.output))

    def _progress(self, state: Progression, item: Started | Delta) -> Event | None:
        if isinstance(item, Started):
            if state.begun:
                return None
            state.begun = True
            return Begun(min(item.cached_tokens, state.job.prompt.count), item.prefill_worker_id)
        first = not state.output
        new, known = state.accept(item)
        if new and first:
            self._note(Progress(request_id=state.request_id, model=state.job.model, phase="first_token"))
        return Tokens(new, item.logprobs[known:]) if new else None

    @staticmethod
    def _ended(item: Ended, worker_id: str) -> Finished:
        if item.reason in ("stop", "length"):
            return Finished(item.reason, item.stop_token_id, item.usage.unpinned_tokens)
        failure = item.error
        if failure is None:
            failure = ErrorReply(
                code=ErrorCode.CANCELLED, message=f"the worker ended the request: {item.reason}", retryable=True
            )
        if failure.retryable:
            raise _Lost(worker_id, failure)
        raise api_error(failure)

    # placing and dispatching

    async def _place(self, state: Progression, prompt: Prompt) -> Placement:
        message = route_request(state.job, prompt, state.excluded)
        message = msgspec.structs.replace(message, request_id=state.request_id)
        subject = self._bus.subjects.route(state.job.model)
        for attempt in range(self._settings.route_retries + 1):
            try:
                placement: Placement = await self._bus.request(
                    subject, message, Placement, timeout_s=self._settings.route_timeout_s, in_parts=False
                )
                return placement
            except RequestFailed as failure:
                again = failure.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED) and failure.retryable
                if again and attempt < self._settings.route_retries:
                    await asyncio.sleep(self._pause(attempt))
                    continue
                if failure.code is ErrorCode.NO_WORKERS and (state.excluded or state.attempt):
                    reply = msgspec.structs.replace(failure.reply, retryable=True)
                    raise _Lost("", reply) from failure
                raise api_error(failure.reply) from failure
        raise AssertionError("the last attempt returns or raises")

    async def _dispatch(self, state: Progression, prompt: Prompt, placement: Placement) -> None:
        accepted = await self._send(state, prompt, placement, known_blocks(placement, prompt))
        if isinstance(accepted, NeedTokens):
            self._resent.inc()
            accepted = await self._send(state, prompt, placement, 0)
        if isinstance(accepted, NeedTokens):
            raise _Lost(placement.worker_id, _unavailable("the worker asks for tokens that it has got"))
        if accepted.incarnation != placement.incarnation:
            raise _Lost(placement.worker_id, _unavailable("the worker has restarted"))

    async def _send(
        self, state: Progression, prompt: Prompt, placement: Placement, prefix_blocks: int
    ) -> Accepted | NeedTokens:
        worker_id = placement.worker_id
        message: Generate = generate_message(
            state.job,
            prompt,
            self._frontend_id,
            resumed=len(state.output),
            prefix_blocks=prefix_blocks,
            prefill=placement.prefill,
        )
        message = msgspec.structs.replace(message, request_id=state.request_id)
        subject = self._bus.subjects.generate(worker_id)
        try:
            reply: Accepted | NeedTokens = await self._bus.request(
                subject, message, Accepted, NeedTokens, timeout_s=self._settings.generate_timeout_s, in_parts=True
            )
        except RequestFailed as failure:
            if failure.retryable:
                raise _Lost(worker_id, failure.reply) from failure
            raise api_error(failure.reply) from failure
        return reply

    def _pause(self, attempt: int) -> float:
        return min(LONGEST_PAUSE_S, self._settings.retry_pause_s * 2.0**attempt)

    # telling others

    def _note(self, progress: Progress) -> None:
        self._later(self._bus.publish(self._bus.subjects.progress(progress.model), progress), "progress")

    def _say_farewell(
        self, model: str, request_id: str, worker_id: str, cancel_reason: str, output_tokens: int
    ) -> None:
        self._note(Progress(request_id=request_id, model=model, phase="finished", output_tokens=output_tokens))
        if worker_id and cancel_reason:
            self._tell_cancelled(worker_id, request_id, cancel_reason)

    def _tell_cancelled(self, worker_id: str, request_id: str, reason: str) -> None:
        self._cancels.labels(reason).inc()
        self._later(self._cancel(worker_id, Cancel(request_id=request_id, reason=reason)), "cancel")

    async def _end_of_called_off(self, state: Progression, stream: StepStream, worker_id: str, reason: str) -> Finished:
        """Tell the worker, and hear what became of the pins: only it knows, and says so at the end."""
        self._tell_cancelled(worker_id, state.request_id, reason)
        ended = await self._rest(state, stream)
        if state.job.session is not None:
            self.on_rest(state.job, state.output)
        return Finished("cancelled", None, asked_pins(state.job) if ended is None else ended.usage.unpinned_tokens)

    async def _hear_rest(self, state: Progression, stream: StepStream) -> None:
        """They are in the worker's blocks, which belong to the session; so are those that were heard of a rest that breaks off."""
        try:
            await self._rest(state, stream)
        finally:
            stream.close()
        self.on_rest(state.job, state.output)

    async def _rest(self, state: Progression, stream: StepStream) -> Ended | None:
        """The few tokens more that a worker says before it hears of the end, and what it says of that; None: it breaks off."""
        ended: Ended | None = None
        try:
            async with asyncio.timeout(self._settings.rest_timeout_s):
                async for item in stream:
                    if isinstance(item, Delta):
                        state.accept(item)
                    elif isinstance(item, Ended):
                        ended = item
        except (TimeoutError, StreamLost, StreamOverflow, GapInOutput):
            self._rests_cut.inc()
        return ended

    async def _cancel(self, worker_id: str, message: Cancel) -> None:
        with suppress(RequestFailed):  # a worker that is gone needs no cancelling
            await self._bus.request(
                self._bus.subjects.control(worker_id), message, Done, timeout_s=CONTROL_TIMEOUT_S, in_parts=False
            )

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """In a task of the service: the request's own task may be about to end by cancellation."""
        try:
            task = self._spawn(work, name=name)
        except RuntimeError:  # the service has crashed and takes no more tasks; leases and deadlines clean up after it
            return
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def settle(self) -> None:
        """Wait until everything that was to be told is told."""
        while self._farewells:
            await asyncio.wait(self._farewells)


def _unavailable(message: str) -> ErrorReply:
    return ErrorReply(code=ErrorCode.UNAVAILABLE, message=message, retryable=True)
