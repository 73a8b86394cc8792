"""Request bodies: read with a limit, unpacked with the same limit."""

import asyncio
from concurrent.futures import Executor

from aiohttp import web

from kvbus_frontend.core.unpacking import encodings_of, too_large, unpack
from kvbus_protocols.errors import ApiError, InvalidRequest


async def read_body(
    request: web.Request, *, limit: int, timeout_s: float, total_timeout_s: float, executor: Executor | None = None
) -> bytes:
    """The body as plain bytes. Raise ApiError: 413 over ``limit``, 408 when nothing comes for ``timeout_s`` or not all of it in
    ``total_timeout_s``, 415 for an unknown encoding. ``executor`` unpacks: even a small body may take long."""
    layers = encodings_of(",".join(request.headers.getall("Content-Encoding", ())))
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit)
    body = await _read(request, limit, timeout_s, total_timeout_s)
    if not layers:
        return body
    return await asyncio.get_running_loop().run_in_executor(executor, unpack, body, layers, limit)


async def _read(request: web.Request, limit: int, timeout_s: float, total_timeout_s: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    clock = asyncio.get_running_loop().time
    end = clock() + total_timeout_s
    while True:
        try:
            async with asyncio.timeout_at(min(clock() + timeout_s, end)):
                piece = await request.content.readany()
        except TimeoutError as error:
            waited_s = total_timeout_s if clock() >= end else timeout_s
            raise ApiError(408, f"The request body did not come within {waited_s:g} s.", code="body_timeout") from error
        except web.RequestPayloadError as error:
            raise InvalidRequest("The request body is broken off or badly framed.", code="invalid_body") from error
        if not piece:
            return b"".join(pieces)
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
