"""Runs what is due, when it is due: no polling, at most one wake-up a second."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

# Nothing here hurries: every request does what is due first, so the timer only serves idle times.
_MIN_WAIT_S = 1.0


class Wakeups:
    """``next_due_s`` says when ``run`` has something to do (None: never), on the loop's clock. Call `changed` when that moves."""

    def __init__(self, next_due_s: Callable[[], float | None], run: Callable[[], None]) -> None:
        self._next_due_s = next_due_s
        self._run = run
        self._earlier = asyncio.Event()
        self._planned_s: float | None = None

    def changed(self) -> None:
        """Something was done. Wakes the timer only when it would be late."""
        due_s = self._next_due_s()
        if due_s is not None and (self._planned_s is None or due_s < self._planned_s):
            self._earlier.set()

    async def run_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._planned_s = self._next_due_s()
            self._earlier.clear()
            wait_s = None if self._planned_s is None else max(_MIN_WAIT_S, self._planned_s - loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._earlier.wait()
                continue
            self._run()
