"""Waiting for a UCX worker without a thread and without spinning.

Who spins takes the core from whoever it waits for, when cores are few: a read of 2 MiB took 15 ms on two busy cores. So after
one try the worker is armed, and its file descriptor wakes the loop.
"""

import asyncio
from typing import Any

_TRIES = 1
_AGAIN_S = 0.02
"""Some transports do not wake: look again after that."""


class Progress:
    """One worker; any number of tasks may wait for it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.address: bytes = worker.address.tobytes()
        worker.init_blocking_progress_mode()
        self._fd: int = worker.epoll_file_descriptor
        self._event: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tries = 0

    async def step(self) -> None:
        """Let it do what can be done; when that is nothing twice, wait until it is something."""
        self.worker.progress()
        self._tries += 1
        if self._tries <= _TRIES:
            await asyncio.sleep(0)
            return
        if self._event is None:
            if not self.worker.arm():  # there is something to do
                await asyncio.sleep(0)
                return
            loop = asyncio.get_running_loop()
            self._event = loop.create_future()
            loop.add_reader(self._fd, self._wake)
            self._timer = loop.call_later(_AGAIN_S, self._wake)
        await asyncio.shield(self._event)

    def wake(self) -> None:
        """Who waits in `step` looks again: something else has happened."""
        self._wake()

    def _wake(self) -> None:
        self._tries = 0
        if self._event is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        event, self._event = self._event, None
        if not event.done():
            event.set_result(None)

    def close(self) -> None:
        """Nobody waits, or ever will: the worker goes now, and its file descriptors with it."""
        self._wake()
        self.worker = None
