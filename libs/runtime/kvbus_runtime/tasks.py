"""One TaskGroup that owns all tasks of a service: a crashed task ends the whole with its cause."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_S = 0.5


class Tasks:
    """An async context manager. Leaving it cancels what still runs. A crashed task cancels the body, and its error is raised
    at the end: the first one as it is, with notes about others."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def __aenter__(self) -> "Tasks":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            for other in group.exceptions[1:]:
                cause.add_note(f"also failed: {other!r}")
            raise cause from cause.__cause__

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task. Raise RuntimeError when the group is closing."""
        if self._closed:
            coro.close()
            raise RuntimeError(f"cannot start {name}: the service has ended")
        task = self._group.create_task(coro, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @property
    def closed(self) -> bool:
        return self._closed

    async def cancel(self) -> None:
        """Cancel everything and wait. Repeats itself, since nats-py swallows a cancellation while it flushes."""
        current = asyncio.current_task()
        while pending := {task for task in self._running if task is not current and not task.done()}:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


def first_cause(error: BaseException) -> BaseException:
    """The first plain exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
