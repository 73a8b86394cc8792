"""How many bytes may be under way at once; who comes first is served first."""

import asyncio
from collections import deque

from kvbus_transfer.errors import LimitReached


class ByteBudget:
    """``waits`` counts those who found no room at once, ``highest_bytes`` is the most that ever was under way."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.highest_bytes = 0
        self.waits = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait for room; `give` it back. Raise LimitReached for what can never fit."""
        if size_bytes > self.limit_bytes:
            raise LimitReached(f"{size_bytes} bytes at once, of {self.limit_bytes} per peer", own=True)
        if self._queue or self.used_bytes + size_bytes > self.limit_bytes:
            await self._wait(size_bytes)
        else:
            self._take(size_bytes)

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._serve()

    async def _wait(self, size_bytes: int) -> None:
        self.waits += 1
        turn = asyncio.get_running_loop().create_future()
        entry = (size_bytes, turn)
        self._queue.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn in the same moment
                self.used_bytes -= size_bytes
            else:
                self._queue.remove(entry)
            self._serve()
            raise

    def _take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.highest_bytes = max(self.highest_bytes, self.used_bytes)

    def _serve(self) -> None:
        while self._queue and self.used_bytes + self._queue[0][0] <= self.limit_bytes:
            size_bytes, turn = self._queue.popleft()
            if not turn.done():
                self._take(size_bytes)
                turn.set_result(None)
