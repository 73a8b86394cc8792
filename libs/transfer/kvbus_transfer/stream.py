"""A connection whose bytes land where they are wanted: no copy between the socket and the block.

On uvloop what is sent is not copied either, which is why `send` returns only when the kernel has all of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from kvbus_transfer.errors import PeerLost
from kvbus_transfer.messages import Spoken, decode, encode

_BUFFER_BYTES = 64 << 10
_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 4 << 20
"""A grant of 65,536 blocks with as many indices takes about 1.5 MiB."""


class Stream(asyncio.BufferedProtocol):
    """One reader and one writer at a time. ``connected`` is called once, when the connection (with TLS: the handshake) is up."""

    def __init__(self, connected: "Callable[[Stream], None]") -> None:
        self._connected = connected
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._arrived: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._paused_reading = False
        self._lost: BaseException | None = None
        self.closed_here = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # With TLS, which copies anyway, asyncio takes a limit of 0 for reached when nothing is held, and waits for ever.
        over_tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=1 if over_tls else 0, low=0)
        self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None
                self._wake()
            return
        self._end += nbytes
        if self._end == _BUFFER_BYTES:
            self._pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc or ConnectionResetError("the peer closed the connection")
        self._target = None
        for waiting in (self._arrived, self._drained):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # What users call.

    @property
    def is_open(self) -> bool:
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    async def read_into(self, target: memoryview) -> None:
        """Fill ``target``. Raise PeerLost. Cancelled in the middle, the connection is of no use any more: close it."""
        taken = min(len(target), self._end - self._start)
        if taken:
            target[:taken] = self._buffer[self._start : self._start + taken]
            self._start += taken
            if self._start == self._end:
                self._start = self._end = 0
        if taken == len(target):
            return
        self._raise_if_lost()
        self._target, self._filled = target, taken
        try:
            # The loop may have stopped reading with a full buffer, which is empty now.
            self._resume_reading()
            while self._target is not None:
                await self._arrival()
        finally:
            self._target = None
        if self._filled != len(target):
            self._raise_if_lost()

    async def receive(self) -> Spoken:
        """The next message. Raise PeerLost, also for what is no message."""
        head = memoryview(bytearray(_LENGTH_BYTES))
        await self.read_into_buffered(head)
        size = int.from_bytes(head, "little")
        if size > MAX_FRAME_BYTES:
            raise PeerLost(f"a message of {size} bytes")
        frame = memoryview(bytearray(size))
        await self.read_into_buffered(frame)
        try:
            message: Spoken = decode(frame)
        except ValueError as error:
            raise PeerLost(f"a message that cannot be read: {error}") from error
        return message

    async def read_into_buffered(self, target: memoryview) -> None:
        """As `read_into`, through the buffer when it fits: one system call then brings a length and what follows."""
        if len(target) > _BUFFER_BYTES // 2:
            await self.read_into(target)
            return
        while self._end - self._start < len(target):
            self._raise_if_lost()
            if self._start:
                held = self._end - self._start
                self._buffer[:held] = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, held
            self._resume_reading()
            await self._arrival()
        await self.read_into(target)

    async def send(self, *parts: bytes | memoryview) -> None:
        """Raise PeerLost. When it returns, the parts may be changed."""
        self._raise_if_lost()
        if self._transport is None:
            raise PeerLost("not connected")
        self._transport.writelines(parts)
        await self.drain()

    async def say(self, message: Spoken) -> None:
        frame = encode(message)
        await self.send(len(frame).to_bytes(_LENGTH_BYTES, "little"), frame)

    async def drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            await self._drained
        self._raise_if_lost()

    def close(self) -> None:
        """At once: what is not sent yet is lost. Idempotent."""
        self.closed_here = True
        if self._transport is not None:
            self._transport.abort()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise PeerLost(str(self._lost))

    async def _arrival(self) -> None:
        self._raise_if_lost()
        self._arrived = asyncio.get_running_loop().create_future()
        try:
            await self._arrived
        finally:
            self._arrived = None
        if self._target is not None or self._lost is not None:
            self._raise_if_lost()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _pause_reading(self) -> None:
        if not self._paused_reading and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused_reading and self._transport is not None and self._lost is None:
            self._paused_reading = False
            self._transport.resume_reading()


async def read_all(stream: Stream, targets: Sequence[memoryview]) -> None:
    for target in targets:
        await stream.read_into(target)
