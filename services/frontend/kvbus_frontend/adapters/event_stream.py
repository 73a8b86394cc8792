"""Server-sent events to one client."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from aiohttp import web


def id_headers(request_id: str) -> dict[str, str]:
    """The id of a request where clients of either company look for it."""
    return {"X-Request-Id": request_id, "Request-Id": request_id}


class EventSink(Protocol):
    """Where the events of a stream go. Raise ConnectionError when nobody is there any more."""

    async def open(self) -> None: ...

    async def send(self, events: Iterable[bytes]) -> None: ...

    async def close(self) -> None:
        """No more events follow."""


class EventStream:
    """Every event goes out in one write, several that wait go out together. Raise ConnectionError when the client is gone."""

    def __init__(self, request: web.Request, *, request_id: str, write_timeout_s: float) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **id_headers(request_id),
            }
        )

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        if data := b"".join(events):
            await self._write(data)

    async def close(self) -> None:
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(data)
        except TimeoutError:
            transport = self._request.transport
            if transport is not None:
                transport.abort()
            raise ConnectionResetError(f"the client has read nothing for {self._timeout_s:g} s") from None
