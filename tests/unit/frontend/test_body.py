"""Packed bodies are unpacked within a limit, whatever they claim to hold."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from kvbus_frontend.core.unpacking import MAX_FRAMES, SUPPORTED, encodings_of, unpack
from kvbus_protocols import ApiError

TEXT = b'{"messages": [' + b"0123456789 abcdefghijklmnopqrstuvwxyz," * 100 + b"]}"
LIMIT = 1 << 20
CHUNK = 1 << 20
"""Room for one step of unpacking, and for the packed body."""


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def streamed_zstd(data: bytes) -> bytes:
    """Without the size of the content in its header."""
    packer = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "br": ("br", lambda data: brotli.compress(data, quality=5)),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "streamed zstd": ("zstd", streamed_zstd),
    "long-distance zstd": ("zstd", zstandard.ZstdCompressor(level=19).compress),
}


@pytest.fixture(params=PACKERS)
def packer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def refusal(body: bytes, encodings: str, limit: int = LIMIT) -> ApiError:
    with pytest.raises(ApiError) as raised:
        unpack(body, encodings_of(encodings), limit)
    return raised.value


def test_a_body_is_unpacked_up_to_exactly_the_limit(packer: str) -> None:
    encoding, pack = PACKERS[packer]
    for data in (b"", b"x", TEXT, b"x" * 300_000):
        assert unpack(pack(data), (encoding,), len(data)) == data
        if data:
            assert refusal(pack(data), encoding, len(data) - 1).status == 413


def test_a_bomb_takes_no_more_memory_than_a_body_within_the_limit(packer: str) -> None:
    encoding, pack = PACKERS[packer]
    bomb = pack(bytes(32 << 20))
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        assert refusal(bomb, encoding).status == 413
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * LIMIT + CHUNK  # in pieces, and joined


def test_a_bomb_inside_of_a_packed_body_is_refused_as_well() -> None:
    assert refusal(gzip.compress(brotli.compress(bytes(8 << 20))), "br, gzip").status == 413


def test_every_way_to_cut_a_body_off_is_refused(packer: str) -> None:
    encoding, pack = PACKERS[packer]
    packed = pack(TEXT)
    for end in (*range(min(len(packed), 40)), *range(len(packed) - 12, len(packed))):
        error = refusal(packed[:end], encoding)
        assert (error.status, error.code) == (400, "invalid_encoding")


def test_data_of_another_kind_is_refused(packer: str) -> None:
    encoding, pack = PACKERS[packer]
    for body in (b'{"model": "m"}', b"\xff" * 100, b"x" + pack(TEXT), pack(TEXT) + b"x"):
        error = refusal(body, encoding)
        assert (error.status, error.code) == (400, "invalid_encoding")


@pytest.mark.parametrize("name", ["gzip", "zstd", "streamed zstd"])
def test_concatenated_frames_are_one_body(name: str) -> None:
    encoding, pack = PACKERS[name]
    packed = b"".join(map(pack, (TEXT, b"", b"middle", TEXT)))
    whole = TEXT + b"middle" + TEXT
    assert unpack(packed, (encoding,), len(whole)) == whole
    assert refusal(packed, encoding, len(whole) - 1).status == 413


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_the_number_of_frames_has_a_limit(name: str) -> None:
    encoding, pack = PACKERS[name]
    assert unpack(pack(b"x") * MAX_FRAMES, (encoding,), LIMIT) == b"x" * MAX_FRAMES
    assert refusal(pack(b"x") * (MAX_FRAMES + 1), encoding).status == 400


def test_a_zstd_window_beyond_8_mib_is_refused() -> None:
    def packed(window_log: int) -> bytes:
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return packer.compress(TEXT) + packer.flush()

    assert unpack(packed(23), ("zstd",), LIMIT) == TEXT
    assert refusal(packed(24), "zstd").status == 400


def test_several_encodings_are_taken_off_in_reverse() -> None:
    packed = zstandard.ZstdCompressor().compress(brotli.compress(gzip.compress(TEXT)))
    assert encodings_of("gzip, br,ZSTD") == ("zstd", "br", "gzip")
    assert unpack(packed, encodings_of("gzip, identity, br, zstd"), LIMIT) == TEXT
    assert refusal(packed, "br, gzip, zstd").status == 400


@pytest.mark.parametrize("header", ["", "identity", " Identity , ,"])
def test_no_encoding_has_no_layers(header: str) -> None:
    assert encodings_of(header) == ()


@pytest.mark.parametrize("header", ["compress", "gzip, lzma", "gzip, gzip, gzip, gzip", "*"])
def test_an_encoding_that_is_not_supported_is_answered_by_those_that_are(header: str) -> None:
    with pytest.raises(ApiError) as raised:
        encodings_of(header)
    error = raised.value
    assert (error.status, error.code) == (415, "unsupported_encoding")
    assert all(name in error.message for name in SUPPORTED)
    assert error.headers["Accept-Encoding"] == "gzip, deflate, br, zstd"


def test_gzip_has_an_old_name() -> None:
    assert encodings_of("x-gzip") == ("gzip",)
