"""The Engine seam around `Compute`: a thread of its own, commands in, step outcomes back to the event loop.

    event loop                          compute thread
    submit, cancel, export, ..  ---->   commands, taken between steps in their order; a request with guidance goes when its
                                        grammar is compiled (`grammars`, in threads and a process of its own)
    sink(StepOutput)            <----   each outcome, in order, at most ``max_steps_ahead`` on their way

An idle thread waits for a command and costs nothing.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec
import structlog

from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Ended, Usage
from kvbus_wire.guidance import Guidance
from kvbus_worker.engines.base import (
    DirectiveRun,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    StepOutput,
    StepSink,
)
from kvbus_worker.engines.step_rates import StepRates
from kvbus_worker.engines.torch import config as model_config
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.checks import check_blocks, check_request
from kvbus_worker.engines.torch.compute import Compute, internal_error
from kvbus_worker.engines.torch.grammars import Grammars
from kvbus_worker.engines.torch.guide import Guide
from kvbus_worker.engines.torch.settings import TorchSettings
from kvbus_worker.engines.torch.sizing import count_blocks, describe

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_EMPTY = StepOutput()


class _LoopClosed(Exception):
    """Nobody is left to hear of anything."""


class TorchEngine:
    """See `Engine`. ``info`` is final after `start`, which measures the rates (and, on GPUs, the room for blocks)."""

    def __init__(self, settings: TorchSettings) -> None:
        settings.check()
        self._settings = settings
        self._config = model_config.read(Path(settings.model_dir))
        self._info = describe(settings, self._config, count_blocks(settings, self._config))
        self._commands: SimpleQueue[Callable[[Compute], None] | None] = SimpleQueue()
        self._steps_ahead = threading.BoundedSemaphore(settings.max_steps_ahead)
        self._open: set[str] = set()
        self._unstarted: set[str] = set()
        self._submitted_tokens = 0  # of all requests ever; minus those the compute thread has taken: on their way
        self._submitted = 0
        self._taken = _Taken()
        self._grammars: Grammars | None = None
        self._compiling: dict[str, asyncio.Task[Guide]] = {}  # requests whose grammar is not ready
        self._live: dict[str, EngineRequest] = {}  # the compute thread's view: taken and not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: StepSink | None = None
        self._exited: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._pool: BlockPool | None = None
        self._rates: StepRates | None = None
        self._closing = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer unless the request ignores it."""
        return self._config.eos_token_ids

    async def start(self, sink: StepSink) -> None:
        if self._loop is not None:
            raise EngineError(ErrorCode.INTERNAL, "the engine was started before")
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._exited = asyncio.Event()
        ready: asyncio.Future[Compute] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="torch-engine", daemon=True)
        self._thread.start()
        compute = await ready
        self._info = compute.info
        self._pool = compute.pool
        self._rates = compute.rates

    async def stop(self) -> None:
        self._closing = True
        await self._stop_compiling()
        if self._exited is not None and self._thread is not None:
            self._commands.put(None)
            await self._exited.wait()
            self._pool = None
            # it still frees the model: a process that ends meanwhile would crash
            await asyncio.to_thread(self._thread.join)

    def submit(self, request: EngineRequest) -> None:
        self._require_running()
        if request.request_id in self._open:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"the request {request.request_id} runs already")
        check_request(request, self._info, self._config.vocab_size, self._settings.max_logprobs)
        if request.guidance is not None:
            self._grammars_now().check(request.guidance)
        if len(self._unstarted) >= self._settings.max_waiting:
            raise EngineError(
                ErrorCode.OVERLOADED,
                f"{len(self._unstarted)} requests are waiting already",
                retryable=True,
                waiting=len(self._unstarted),
            )
        self._open.add(request.request_id)
        self._unstarted.add(request.request_id)
        self._submitted += 1
        self._submitted_tokens += len(request.tokens)
        arrived_s = time.monotonic()
        if request.guidance is None:
            self._commands.put(lambda compute: self._take(compute, request, arrived_s, None))
        else:
            self._compile(request, request.guidance, arrived_s)

    def cancel(self, request_id: str) -> None:
        compiling = self._compiling.get(request_id)
        if compiling is not None:
            compiling.cancel()
        elif request_id in self._open:
            self._commands.put(lambda compute: self._emit(compute, compute.cancel(request_id)))

    def load(self) -> EngineLoad:
        taken = self._taken
        if taken.load is None or self._rates is None:
            info = self._info
            return EngineLoad(
                running=0,
                waiting=self._submitted,
                waiting_tokens=self._submitted_tokens,
                used_blocks=0,
                total_blocks=info.total_blocks,
                prefill_tokens_per_s=info.prefill_tokens_per_s,
                decode_step_s=info.decode_step_s,
            )
        return msgspec.structs.replace(
            taken.load,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,  # of now: it changes while nothing is computed
            waiting=taken.load.waiting + self._submitted - taken.requests,
            waiting_tokens=taken.load.waiting_tokens + self._submitted_tokens - taken.tokens,
        )

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        pool = self._pool
        if pool is None:
            return 0
        for count, key in enumerate(keys):
            if not pool.contains(key):
                return count
        return len(keys)

    async def export_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self._require_running()
        check_blocks(self._info, keys, into)
        targets = [view.cast("B") for view in into]
        return await self._ask(lambda compute: compute.export_blocks(keys, targets))

    async def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        data: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> int:
        self._require_running()
        check_blocks(self._info, keys, data, tokens)
        sources = [view.cast("B") for view in data]

        def run(compute: Compute) -> int:
            count, output = compute.import_blocks(parent, keys, tokens, sources, said)
            self._emit(compute, output)
            return count

        return await self._ask(run)

    def directives(self, keys: Sequence[bytes]) -> list[Directive]:
        pool = self._pool
        return [Directive() if pool is None else pool.directive(key) for key in keys]

    async def touch(self, keys: Sequence[bytes], directives: Sequence[DirectiveRun]) -> int:
        self._require_running()
        return await self._ask(lambda compute: compute.touch(keys, directives))

    async def drop_blocks(self, keys: Sequence[bytes]) -> int:
        self._require_running()

        def run(compute: Compute) -> int:
            count, output = compute.drop_blocks(keys)
            self._emit(compute, output)
            return count

        return await self._ask(run)

    # on the event loop

    def _grammars_now(self) -> Grammars:
        """Made for the first request with guidance: a vocabulary takes memory, and not every worker sees one."""
        if self._grammars is None:
            self._grammars = Grammars(
                Path(self._settings.model_dir),
                self._config.vocab_size,
                self._config.eos_token_ids,
                self._settings.grammars,
            )
        return self._grammars

    def _compile(self, request: EngineRequest, guidance: Guidance, arrived_s: float) -> None:
        output = request.tokens[len(request.tokens) - request.resumed :]
        task = asyncio.create_task(self._grammars_now().guide(guidance, output), name=f"grammar {request.request_id}")
        self._compiling[request.request_id] = task
        task.add_done_callback(lambda done: self._compiled(request, done, arrived_s))

    def _compiled(self, request: EngineRequest, done: "asyncio.Task[Guide]", arrived_s: float) -> None:
        """Either the request goes to the compute thread, or it has its Ended now."""
        del self._compiling[request.request_id]
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            self._give_up(request, "cancelled", None)
        elif isinstance(error, EngineError):
            self._give_up(request, "error", error.reply)
        elif error is not None:
            _log.error("compiling a grammar failed", request=request.request_id, exc_info=error)
            self._give_up(request, "error", internal_error(error))
        else:
            guide = done.result()
            self._commands.put(lambda compute: self._take(compute, request, arrived_s, guide))

    def _give_up(self, request: EngineRequest, reason: str, error: ErrorReply | None) -> None:
        self._submitted -= 1
        self._submitted_tokens -= len(request.tokens)
        self._hand_on(StepOutput(ended=(_ended_untaken(request, reason, error),)))

    async def _stop_compiling(self) -> None:
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._grammars is not None:
            await self._grammars.close()

    def _require_running(self) -> None:
        if self._pool is None or self._closing:
            raise EngineError(ErrorCode.UNAVAILABLE, "the engine does not run", retryable=True)

    async def _ask(self, command: Callable[[Compute], T]) -> T:
        """Run ``command`` between two steps. A cancelled caller waits for it all the same: it still uses the caller's memory."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(compute: Compute) -> None:
            try:
                result = command(compute)
            except _LoopClosed:
                raise
            except Exception as error:
                _log.exception("moving blocks failed")
                failure = EngineError(ErrorCode.INTERNAL, f"moving blocks failed: {error!r}", retryable=True)
                self._post(lambda: answer.set_exception(failure))
            else:
                self._post(lambda: answer.set_result(result))

        self._commands.put(run)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._hand_on(output)
        finally:
            self._steps_ahead.release()

    def _hand_on(self, output: StepOutput) -> None:
        self._unstarted.difference_update(event.request_id for event in output.started)
        for event in output.ended:
            self._unstarted.discard(event.request_id)
            self._open.discard(event.request_id)
        if self._sink is not None:
            self._sink(output)

    # in the compute thread

    def _run(self, ready: "asyncio.Future[Compute]") -> None:
        exited = self._exited
        try:
            try:
                compute = Compute(self._settings, self._config)
            except EngineError as error:
                self._post(lambda error=error: _fail(ready, error))  # type: ignore[misc]
            except Exception as error:
                _log.exception("the model cannot be loaded")
                failure = EngineError(ErrorCode.UNAVAILABLE, f"the model cannot be loaded: {error!r}")
                self._post(lambda: _fail(ready, failure))
            else:
                self._post(lambda: _succeed(ready, compute))
                self._serve(compute)
        except _LoopClosed:
            _log.warning("the event loop is gone; the engine ends")
        finally:
            if exited is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(exited.set)

    def _serve(self, compute: Compute) -> None:
        while True:
            try:
                if not self._take_commands(compute):
                    self._emit(compute, compute.end_all("cancelled"))
                    return
                self._emit(compute, compute.step())
            except _LoopClosed:
                raise
            except Exception as error:
                _log.exception("the engine failed; all requests end and the cache is dropped")
                reply = internal_error(error)
                self._emit(compute, self._with_all_ended(compute.end_all("error", reply), reply))

    def _take_commands(self, compute: Compute) -> bool:
        """Run what was asked for; wait for something to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not compute.has_work)
            except Empty:
                return True
            if command is None:
                return False
            command(compute)

    def _take(self, compute: Compute, request: EngineRequest, arrived_s: float, guide: Guide | None) -> None:
        self._live[request.request_id] = request
        self._taken = _Taken(self._taken.requests + 1, self._taken.tokens + len(request.tokens), self._taken.load)
        self._emit(compute, compute.submit(request, arrived_s, guide))

    def _with_all_ended(self, output: StepOutput, error: ErrorReply) -> StepOutput:
        """Whatever state the failure left behind: each request that was taken ends."""
        ended = {event.request_id for event in output.ended}
        lost = tuple(
            _ended_untaken(request, "error", error)
            for request in self._live.values()
            if request.request_id not in ended
        )
        return msgspec.structs.replace(output, ended=output.ended + lost)

    def _emit(self, compute: Compute, output: StepOutput) -> None:
        """Hand over an outcome; the load it leaves is visible before it is."""
        self._taken = _Taken(self._taken.requests, self._taken.tokens, compute.load())
        if output == _EMPTY:
            return
        for event in output.ended:
            self._live.pop(event.request_id, None)
        self._steps_ahead.acquire()
        self._post(lambda: self._deliver(output))

    def _post(self, callback: Callable[[], object]) -> None:
        if self._loop is None or self._loop.is_closed():
            raise _LoopClosed
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError as error:  # closed meanwhile
            raise _LoopClosed from error


class _Taken(msgspec.Struct, frozen=True):
    """How many requests and tokens the compute thread has taken so far, and its load after the last change."""

    requests: int = 0
    tokens: int = 0
    load: EngineLoad | None = None


def _ended_untaken(request: EngineRequest, reason: str, error: ErrorReply | None) -> Ended:
    usage = Usage(prompt_tokens=len(request.tokens) - request.resumed, output_tokens=request.resumed)
    return Ended(request_id=request.request_id, reason=reason, usage=usage, error=error)


def _succeed(ready: "asyncio.Future[Compute]", compute: Compute) -> None:
    if not ready.done():
        ready.set_result(compute)


def _fail(ready: "asyncio.Future[Compute]", error: EngineError) -> None:
    if not ready.done():
        ready.set_exception(error)
