"""Unpacking of request bodies. A few bytes may claim to be many: never more than the limit and one chunk come out of them."""

import zlib
from collections.abc import Callable, Sequence

import brotli
import zstandard

from kvbus_protocols.errors import ApiError, InvalidRequest

SUPPORTED = ("gzip", "deflate", "br", "zstd")
_ALIASES = {"x-gzip": "gzip"}
MAX_ENCODINGS = 3
"""Layers of packing. Nobody needs a second one."""
MAX_FRAMES = 64
"""Concatenated members (gzip) or frames (zstd) of one body. Behind each, the rest of the body is copied."""

_CHUNK_BYTES = 64 << 10
_ZSTD_WINDOW_BYTES = 8 << 20
"""The largest window that RFC 9659 allows for this content coding. Windows of brotli end at 16 MiB by themselves."""
_ZSTD_BLOCK_BYTES = 128 << 10
_ZSTD_LEAST_BLOCK = 4
"""Packed bytes of a block that repeats one byte: the most that zstd can claim per byte is a whole block in four."""
_GZIP_WINDOW_BITS, _ZLIB_WINDOW_BITS, _RAW_WINDOW_BITS = 31, 15, -15


class _CutOff(Exception):
    """The data ends inside of a frame."""


class _Plain:
    """What a layer has unpacked to so far."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self.room = limit

    def add(self, piece: bytes) -> None:
        """Raise ApiError beyond the limit."""
        self.room -= len(piece)
        if self.room < 0:
            raise too_large(self._limit)
        self._pieces.append(piece)

    def joined(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


_Frame = Callable[[bytes, _Plain], bytes]
"""Unpacks the first frame of the data; what follows it."""


def encodings_of(header: str) -> tuple[str, ...]:
    """The layers of a ``Content-Encoding``, the outermost first. Raise ApiError: 415 for one that is not supported."""
    names = [name.strip().lower() for name in header.split(",")]
    layers = tuple(_ALIASES.get(name, name) for name in reversed(names) if name not in ("", "identity"))
    unknown = next((name for name in layers if name not in SUPPORTED), None)
    if unknown is not None or len(layers) > MAX_ENCODINGS:
        problem = (
            f"The content encoding '{unknown}' is not supported" if unknown else f"{len(layers)} encodings are too many"
        )
        raise ApiError(
            415,
            f"{problem}; use {', '.join(SUPPORTED)} or none.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": ", ".join(SUPPORTED)},
        )
    return layers


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the limit of {limit} bytes.", code="request_too_large")


def unpack(body: bytes, layers: Sequence[str], limit: int) -> bytes:
    """Raise ApiError: 413 when any layer holds more than ``limit`` bytes, 400 for broken data."""
    for layer in layers:
        try:
            body = _unpack(body, layer, limit)
        except (_CutOff, zlib.error, brotli.error, zstandard.ZstdError) as error:
            what = f"cut-off {layer} data" if isinstance(error, _CutOff) else f"not valid {layer} data"
            raise InvalidRequest(f"The request body is {what}.", code="invalid_encoding") from error
    return body


def _unpack(body: bytes, layer: str, limit: int) -> bytes:
    plain = _Plain(limit)
    for _ in range(MAX_FRAMES if layer in _CONCATENATED else 1):
        body = _FRAMES[layer](body, plain)
        if not body:
            return plain.joined()
    raise InvalidRequest(f"The request body has bytes after its {layer} data.", code="invalid_encoding")


def _zlib_frame(data: bytes, plain: _Plain, window_bits: int) -> bytes:
    unpacker = zlib.decompressobj(window_bits)
    plain.add(unpacker.decompress(data, plain.room + 1))
    if not unpacker.eof:
        raise _CutOff
    return unpacker.unused_data


def _gzip_frame(data: bytes, plain: _Plain) -> bytes:
    return _zlib_frame(data, plain, _GZIP_WINDOW_BITS)


def _deflate_frame(data: bytes, plain: _Plain) -> bytes:
    """The zlib format, as the standard has it, or bare deflate, as many clients have it: told apart by the header."""
    has_header = len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return _zlib_frame(data, plain, _ZLIB_WINDOW_BITS if has_header else _RAW_WINDOW_BITS)


def _brotli_frame(data: bytes, plain: _Plain) -> bytes:
    unpacker = brotli.Decompressor()
    piece = unpacker.process(data, output_buffer_limit=_CHUNK_BYTES)
    while True:
        plain.add(piece)
        if unpacker.is_finished():
            return b""  # it raises at bytes after the end
        if not piece:
            raise _CutOff
        piece = unpacker.process(b"", output_buffer_limit=_CHUNK_BYTES)


def _zstd_frame(data: bytes, plain: _Plain) -> bytes:
    """In slices so thin that, at the densest packing, each unpacks to what there is room for, and a few blocks."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
    view = memoryview(data)
    start = 0
    while start < len(data):
        blocks = 1 + plain.room // _ZSTD_BLOCK_BYTES
        end = min(len(data), start + blocks * _ZSTD_LEAST_BLOCK)
        plain.add(unpacker.decompress(view[start:end]))
        if unpacker.eof:
            return data[end - len(unpacker.unused_data) :]
        start = end
    raise _CutOff


_CONCATENATED = ("gzip", "zstd")
_FRAMES: dict[str, _Frame] = {
    "gzip": _gzip_frame,
    "deflate": _deflate_frame,
    "br": _brotli_frame,
    "zstd": _zstd_frame,
}
