"""Waiting that leaves nothing running behind it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """For calls that compute: one that is cancelled ends before this returns, so that it uses nothing of the caller's later."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled([task])
        raise


async def settled(tasks: Iterable["asyncio.Future[T]"]) -> None:
    """All have ended, whatever happens to us meanwhile. The caller knows that they do."""
    left = {task for task in tasks if not task.done()}
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError:
            left = {task for task in left if not task.done()}


async def all_of(tasks: Sequence["asyncio.Task[T]"]) -> list[T]:
    """What they return; when we are cancelled or one raises, the others are cancelled and have ended."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await settled(tasks)
        raise
