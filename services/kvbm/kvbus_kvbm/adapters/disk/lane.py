"""Who may write: one at a time."""

import asyncio
from collections import deque


class Lane:
    """A lock that can also be taken without waiting, and that whoever holds it gives up from a callback. At most ``max_waiting``
    wait for it, in order."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    def try_enter(self) -> bool:
        if self._is_taken:
            return False
        self._is_taken = True
        return True

    async def enter(self, timeout_s: float) -> bool:
        """False: not in time, or too many wait already."""
        if self.try_enter():
            return True
        if len(self._waiting) >= self._max_waiting:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait((turn,), timeout=timeout_s)
        except asyncio.CancelledError:
            self._forget(turn)
            raise
        if turn.done():
            return True
        self._forget(turn)
        return False

    def leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the lane stays taken: it is theirs now
                return
        self._is_taken = False

    def _forget(self, turn: "asyncio.Future[None]") -> None:
        if turn.done():
            self.leave()
        else:
            self._waiting.remove(turn)
