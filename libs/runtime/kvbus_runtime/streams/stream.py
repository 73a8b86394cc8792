"""What one request's consumer reads: events in order, bounded, joined while the consumer is behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvbus_runtime.errors import RuntimeFailure
from kvbus_wire.frontend import Delta, Ended, Started, TokenLogprob


class StreamLost(RuntimeFailure):
    """The rest of the stream cannot be had from this worker; the request may go on elsewhere."""

    def __init__(self, worker_id: str, reason: str) -> None:
        super().__init__(f"the stream from {worker_id} is lost: {reason}")
        self.worker_id = worker_id
        self.reason = reason


class StreamOverflow(RuntimeFailure):
    """The consumer is too slow: ``limit`` tokens wait for it. Cancel the request."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} tokens wait for a slow consumer")
        self.limit = limit


class StepStream:
    """An async iterator of Started, Delta and Ended; it ends behind Ended. One consumer.

    Deltas that wait are joined into one, so a slow consumer costs tokens, not messages. Raise StreamLost or StreamOverflow; what
    arrived before is delivered first.
    """

    def __init__(self, worker_id: str, max_tokens: int, on_close: Callable[[], None]) -> None:
        self.worker_id = worker_id
        self.is_read = False
        self._max_tokens = max_tokens
        self._on_close = on_close
        self._started: Started | None = None
        self._deltas: list[Delta] = []
        self._waiting_tokens = 0
        self._next: int | None = None
        self._ended: Ended | None = None
        self._failure: RuntimeFailure | None = None
        self._finished = False
        self._wake = asyncio.Event()
        self._interrupt: Callable[[], None] | None = None

    # the receiver's side

    def push(self, item: Started | Delta | Ended) -> None:
        if self._ended is not None or self._failure is not None or self._finished:
            return
        match item:
            case Started():
                self._started = item
            case Delta():
                self._push_delta(item)
            case Ended():
                self._ended = item
        self._wake.set()

    def _push_delta(self, delta: Delta) -> None:
        """start == next: in order;  start < next: its head is known;  start > next: something is missing."""
        count = len(delta.tokens) // 4
        if self._next is not None and delta.start != self._next:
            known = self._next - delta.start
            if known < 0:
                self.fail(StreamLost(self.worker_id, f"output {self._next}..{delta.start - 1} is missing"))
                return
            if known >= count:
                return
            delta = Delta(delta.request_id, self._next, delta.tokens[known * 4 :], delta.logprobs[known:])
            count -= known
        self._next = delta.start + count
        if self._waiting_tokens + count > self._max_tokens:
            self.fail(StreamOverflow(self._max_tokens))
            return
        self._waiting_tokens += count
        self._deltas.append(delta)

    def fail(self, failure: RuntimeFailure) -> None:
        if self._ended is None and self._failure is None:
            self._failure = failure
            self._wake.set()
            if self._interrupt is not None:
                self._interrupt()

    @property
    def is_over(self) -> bool:
        return self._ended is not None or self._failure is not None or self._finished

    # the consumer's side

    def __aiter__(self) -> "StepStream":
        return self

    async def __anext__(self) -> Started | Delta | Ended:
        self.is_read = True
        while True:
            item = self._take()
            if item is not None:
                return item
            if self._finished:
                raise StopAsyncIteration
            if self._failure is not None:
                self._finish()
                raise self._failure
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> Started | Delta | Ended | None:
        if self._started is not None:
            started, self._started = self._started, None
            return started
        if self._deltas:
            waiting, self._deltas = self._deltas, []
            self._waiting_tokens = 0
            return waiting[0] if len(waiting) == 1 else _join(waiting)
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._finish()
            return ended
        return None

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._on_close()

    @asynccontextmanager
    async def unless_failed(self) -> AsyncIterator[None]:
        """For what is awaited from the worker before its stream is read: the block is left as soon as the stream fails. Raise
        StreamLost, StreamOverflow."""
        try:
            async with asyncio.timeout(None) as scope:
                loop = asyncio.get_running_loop()
                self._interrupt = lambda: scope.reschedule(loop.time())
                try:
                    if self._failure is not None:
                        raise self._failure
                    yield
                finally:
                    self._interrupt = None
        except TimeoutError:
            if self._failure is None:
                raise
            raise self._failure from None

    def close(self) -> None:
        """The consumer wants no more. Idempotent. It does not cancel the request."""
        self._finish()
        self._wake.set()


def _join(deltas: list[Delta]) -> Delta:
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        logprobs.extend(delta.logprobs)
    tokens = b"".join(delta.tokens for delta in deltas)
    return Delta(deltas[0].request_id, deltas[0].start, tokens, tuple(logprobs))
