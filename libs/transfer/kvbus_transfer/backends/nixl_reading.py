"""One read through a channel: the pieces, and when they are there the entry of the lease table."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from kvbus_transfer.backends.copy_threads import CopyThreads
from kvbus_transfer.backends.nixl_channel import Channel, ChannelFailed, Piece, Place
from kvbus_transfer.endings import to_the_end

_POST_BYTES = 8 << 20
_WINDOW = 8
_PIECES = 64
_WAKE_AGAIN_S = 0.04
_ABANDON_S = 0.5
_BURST_S = 0.001
"""For so long at most a thread asks NIXL again and again; then others get their turn."""
TRIES = 16
PAUSE_S = 0.001
"""NIXL has nothing that could be waited for. Who asks it all the time takes the core from the other side, when cores are few."""


class Reading:
    """It goes on when it is told to, in any thread, but in one at a time: NIXL moves bytes only while it is called.

    `stop` may be called at any time; what is under way then must have ended, or its channel be destroyed, before the targets are
    given back (`settle`).
    """

    def __init__(
        self, channel: Channel, metadata: bytes, pieces: Sequence[Piece], entry: int, places: tuple[Place, Place]
    ) -> None:
        """``entry``: its address at the owner. ``places``: of the targets, of the source."""
        self._channel = channel
        self._metadata = metadata
        self._pieces = pieces
        self._entry_address = entry
        self._places = places
        self._strangers = channel.strangers(pieces)
        self._registered: Any = None
        self._is_prepared = False
        self._to_post: deque[Any] = deque()
        self._under_way: list[Any] = []
        self._ended: list[Any] = []
        self._entry: Any = None
        self._is_at_the_entry = False
        self._is_stopped = False

    @property
    def is_quickly_prepared(self) -> bool:
        """In some microseconds: nothing is to be connected or registered before."""
        return self._channel.knows(self._metadata) and not self._strangers and len(self._pieces) <= _PIECES

    def prepare(self) -> None:
        """All but to post it. Raise ChannelFailed."""
        if self._is_prepared:
            return
        self._is_prepared = True
        channel = self._channel
        channel.know(self._metadata)
        if self._strangers:
            self._registered = channel.register(self._strangers, self._places[0])
        for batch in batches(self._pieces):
            self._to_post.append(channel.transfer(batch, self._places))
        self._entry = channel.entry_transfer(self._entry_address)

    def stop(self) -> None:
        """Nothing more is begun."""
        self._is_stopped = True

    def advance(self, for_s: float) -> bool:
        """Go on for so long at most, beyond what comes at once: True when all is there. Raise ChannelFailed."""
        until = time.monotonic() + for_s
        if not self._is_stopped:
            self.prepare()
        while not self._is_stopped:
            self._look()
            self._post()
            if not self._under_way:
                break
            if time.monotonic() >= until:
                return False
        if self._registered is not None:
            self.end()
        return not self._is_stopped

    def entry(self) -> bytes:
        return self._channel.entry()

    def settle(self, for_s: float) -> bool:
        """True when nothing is under way any more. It must have been stopped."""
        until = time.monotonic() + for_s
        while self._under_way:
            try:
                self._look()
            except ChannelFailed:
                self._channel.is_broken = True  # it is destroyed when it is given back: parts of that one may go on
                continue
            if time.monotonic() >= until:
                return not self._under_way
        return True

    def end(self) -> None:
        """Nothing is under way: let go of all that NIXL holds for it. Idempotent."""
        while self._ended:
            self._channel.let_go(self._ended.pop())
        while self._to_post:
            self._channel.let_go(self._to_post.pop())
        if self._registered is not None:
            self._channel.deregister(self._registered)
            self._registered = None

    def destroy(self) -> None:
        """Nothing is under way any more, and the channel is gone."""
        for handles in (self._under_way, self._ended, self._to_post):
            handles.clear()  # they refer to the agent
        self._registered = self._entry = None
        self._channel.destroy()

    def _post(self) -> None:
        while self._to_post and len(self._under_way) < _WINDOW and not self._is_stopped:
            self._take(handle := self._to_post.popleft(), self._channel.post(handle))
        if not self._to_post and not self._under_way and not self._is_at_the_entry and not self._is_stopped:
            self._is_at_the_entry = True
            self._take(self._entry, self._channel.post(self._entry))

    def _look(self) -> None:
        handles, self._under_way = self._under_way, []
        try:
            while handles:
                handle = handles.pop(0)
                self._take(handle, self._channel.state(handle))
        finally:
            self._under_way.extend(handles)

    def _take(self, handle: Any, state: str) -> None:
        if state == "PROC":
            self._under_way.append(handle)
            return
        if handle is not self._entry:
            self._ended.append(handle)
        if state != "DONE":
            raise ChannelFailed(f"NIXL ended a transfer with {state}")


def batches(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Lists of at most 8 MiB together: what one call may copy (0.7 ms) before it is seen that nobody wants it any more."""
    found: list[list[Piece]] = []
    held = _POST_BYTES
    for to, source, length in pieces:
        at = 0
        while at < length:
            if held >= _POST_BYTES:
                found.append([])
                held = 0
            part = min(length - at, _POST_BYTES - held)
            found[-1].append((to + at, source + at, part))
            at += part
            held += part
    return found


async def carry_out(
    reading: Reading, threads: CopyThreads | None, wake: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    """Until all is there. ``threads``: where to call NIXL, None: here. ``wake``: tell the owner that it has to help.

    Raise ChannelFailed, and what ``wake`` raises. However it ends, nothing writes to the targets any more.
    """
    try:
        if reading.is_quickly_prepared:
            reading.prepare()  # a thread waits for the interpreter after each call of NIXL's
        if not await _do(reading, reading.advance, threads):
            await _wait(reading, threads, wake)
        reading.end()
    except BaseException:
        reading.stop()
        await to_the_end(_abandon(reading, threads))
        raise


async def _wait(reading: Reading, threads: CopyThreads | None, wake: Callable[[], Coroutine[Any, Any, object]]) -> None:
    waking: asyncio.Task[object] | None = None
    wake_at = 0.0
    tries = 0
    try:
        while True:
            if waking is not None and waking.done():
                waking.result()
                waking = None
            if waking is None and time.monotonic() >= wake_at:
                wake_at = time.monotonic() + _WAKE_AGAIN_S
                waking = asyncio.get_running_loop().create_task(wake())
            tries += 1
            await asyncio.sleep(0 if threads is None and tries % TRIES else PAUSE_S)
            if await _do(reading, reading.advance, threads):
                return
    finally:
        if waking is not None:
            waking.cancel()
            await asyncio.wait([waking])
            if not waking.cancelled():
                waking.exception()


async def _abandon(reading: Reading, threads: CopyThreads | None) -> None:
    """Let what is under way end, or destroy the agent that does it."""
    until = time.monotonic() + _ABANDON_S
    is_settled = False
    try:
        while time.monotonic() < until and not is_settled:
            is_settled = await _do(reading, reading.settle, threads)
            if not is_settled:
                await asyncio.sleep(PAUSE_S)
    finally:
        if is_settled:
            reading.end()
        else:
            reading.destroy()


async def _do(reading: Reading, work: Callable[[float], bool], threads: CopyThreads | None) -> bool:
    """A step of it, which has ended when this ends. Raise ChannelFailed."""
    if threads is None:
        return work(0.0)
    done: bool | ChannelFailed = await threads.do(partial(_caught, work), reading.stop)
    if isinstance(done, ChannelFailed):
        raise done
    return done


def _caught(work: Callable[[float], bool]) -> bool | ChannelFailed:
    try:
        return work(_BURST_S)
    except ChannelFailed as failed:
        return failed.with_traceback(None)  # its frames refer to the agent, which may have to go
