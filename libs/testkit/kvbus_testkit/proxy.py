"""A TCP proxy that a test puts between one participant and its server: cut, stalled and healed at will."""

import asyncio
from contextlib import suppress
from types import TracebackType


class TcpProxy:
    """An async context manager. ``url`` leads to ``target`` (``nats://host:port``). ``port``: where it listens (0: any free one).

    `cut`: connections break and new ones are refused. `stall`: nothing passes, and nobody is told (a half-open connection).
    `heal` ends both.
    """

    def __init__(self, target: str, port: int = 0) -> None:
        self._scheme, _, address = target.rpartition("//")
        host, _, target_port = address.rpartition(":")
        self._target = (host, int(target_port))
        self._server: asyncio.Server | None = None
        self._port = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{self._scheme}//127.0.0.1:{self._port}"

    async def __aenter__(self) -> "TcpProxy":
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections))

    def stall(self) -> None:
        self._passing.clear()

    async def heal(self) -> None:
        self._passing.set()
        if self._server is None:
            await self._listen()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            writers.append(up_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, up_writer))
                both.create_task(self._pump(up_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            return
        finally:
            for one in writers:
                one.transport.abort()
                with suppress(OSError, asyncio.CancelledError):
                    await one.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one side has closed")
