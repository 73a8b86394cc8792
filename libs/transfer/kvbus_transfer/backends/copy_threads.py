"""Threads that copy, by memcpy or by a library. A step that is cancelled is told so and waited for.

To go to a thread and back takes 70 us when both sides sleep meanwhile and 20 us when four go at a time; the future of an executor,
which can be waited for by anybody, takes 83 and 33.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self

from kvbus_transfer.endings import to_the_end

_THREADS = 2
# Reads up to this are always done on the loop, which takes 0.1 ms at most: to go to a thread and back takes as long.
_SMALL_BYTES = 512 << 10


def _nothing() -> None:
    pass


class _Step:
    """What is to be done, and who waits for it. All but ``work`` belongs to the loop."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.turn: asyncio.Future[None] = loop.create_future()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def end(self, result: Any, error: BaseException | None) -> None:
        self.is_done, self.result, self.error = True, result, error
        if not self.turn.done():
            self.turn.set_result(None)


class CopyThreads:
    """Two; they start when they are first needed. As a context manager it counts reads: one is under way inside."""

    def __init__(self, name: str, inline_bytes: int) -> None:
        """``inline_bytes``: reads of more are never for the loop."""
        self._name = name
        self._inline_bytes = inline_bytes
        self._queue: SimpleQueue[_Step | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._reads = 0
        self._is_stopped = False

    def __enter__(self) -> Self:
        self._reads += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._reads -= 1

    async def are_for(self, size_bytes: int) -> bool:
        """A thread is worth its while when a read is large, or when several can overlap."""
        if size_bytes <= min(_SMALL_BYTES, self._inline_bytes):
            return False
        if size_bytes > self._inline_bytes:
            return True
        if self._reads == 1:
            await asyncio.sleep(0)  # who begins in the same moment is counted, too
        return self._reads > 1

    async def do(self, work: Callable[[], Any], cancel: Callable[[], None] = _nothing) -> Any:
        """It has ended when this ends, cancelled too; ``cancel`` makes it end early. What it raises is raised."""
        if self._is_stopped:
            return work()
        if not self._threads:
            self._start()
        loop = asyncio.get_running_loop()
        step = _Step(work, loop)
        self._queue.put(step)
        try:
            await step.turn
        except asyncio.CancelledError:
            cancel()
            if not step.is_done:
                step.turn = loop.create_future()
                await to_the_end(step.turn)
            raise
        if step.error is not None:
            error, step.error = step.error, None
            try:
                raise error
            finally:
                del error
        return step.result

    async def stop(self) -> None:
        """What was begun is done; what comes later is done on the loop. Idempotent."""
        self._is_stopped = True
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            await asyncio.to_thread(thread.join)

    def _start(self) -> None:
        for number in range(_THREADS):
            thread = threading.Thread(target=_run, args=(self._queue,), name=f"{self._name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)


def _run(queue: "SimpleQueue[_Step | None]") -> None:
    while (step := queue.get()) is not None:
        result, error = None, None
        try:
            result = step.work()
        except BaseException as raised:  # it is raised where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            step.loop.call_soon_threadsafe(step.end, result, error)
        del step, result, error
