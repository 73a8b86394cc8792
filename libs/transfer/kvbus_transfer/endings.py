"""Ends that must be reached."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_the_end(work: "Coroutine[Any, Any, None] | asyncio.Future[None]") -> None:
    """Wait until it is done, however often this task is cancelled meanwhile. For what takes milliseconds and must not be left
    half done; its errors are the caller's, a cancellation is raised at the end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as again:
            cancelled = again
    if cancelled is not None:
        raise cancelled
    task.result()
