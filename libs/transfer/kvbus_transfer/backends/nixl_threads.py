"""Threads that call NIXL. Unlike the future of an executor, a step that is cancelled is told so and waited for."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvbus_transfer.endings import to_the_end

_THREADS = 2


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
    """As many as there are cores beside the loop's, two at most; they start when they are first needed."""

    def __init__(self) -> None:
        self._count = max(1, min(_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._queue: SimpleQueue[_Step | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    async def do(self, work: Callable[[], Any], cancel: Callable[[], None]) -> Any:
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
        for number in range(self._count):
            thread = threading.Thread(target=_run, args=(self._queue,), name=f"kvbus-nixl-{number}", daemon=True)
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
