"""Request bodies: read with a limit, unpacked with the same limit."""

import asyncio
import zlib

from aiohttp import web

from kvbus_protocols.errors import ApiError, InvalidRequest

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 47}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the limit of {limit} bytes.", code="request_too_large")


async def read_body(request: web.Request, *, limit: int, timeout_s: float, total_timeout_s: float) -> bytes:
    """The body as plain bytes. Raise ApiError: 413 over ``limit``, 408 when nothing comes for ``timeout_s`` or not all of it in
    ``total_timeout_s``, 415 for an unknown encoding."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_WINDOW_BITS):
        raise ApiError(
            415, f"The content encoding '{encoding}' is not supported; use gzip or none.", code="unsupported_encoding"
        )
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    body = await _read(request, limit, timeout_s, total_timeout_s)
    return unpack(body, encoding, limit) if encoding in _WINDOW_BITS else body


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
            raise _too_large(limit)
        pieces.append(piece)


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Raise ApiError: 413 over ``limit`` bytes unpacked, 400 for broken data."""
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = unpacker.decompress(body, limit + 1)
        if len(plain) > limit:
            raise _too_large(limit)
        plain += unpacker.flush()
    except zlib.error as error:
        raise InvalidRequest(f"The request body is not valid {encoding} data.", code="invalid_encoding") from error
    if not unpacker.eof:
        raise InvalidRequest(f"The request body is cut-off {encoding} data.", code="invalid_encoding")
    return plain
