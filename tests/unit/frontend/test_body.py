"""Packed bodies never grow beyond the limit."""

import gzip
import zlib

import pytest

from kvbus_frontend.adapters.body import unpack
from kvbus_protocols import ApiError


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(b"x" * 1000)),
        ("deflate", zlib.compress(b"x" * 1000)),
    ],
)
def test_a_body_is_unpacked_up_to_exactly_the_limit(encoding: str, data: bytes) -> None:
    assert unpack(data, encoding, 1000) == b"x" * 1000
    with pytest.raises(ApiError) as refusal:
        unpack(data, encoding, 999)
    assert refusal.value.status == 413


@pytest.mark.parametrize("data", [b"", b"x", gzip.compress(b"abc")[:-1], gzip.compress(b"abc")[:5]])
def test_broken_data_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        unpack(data, "gzip", 100)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_encoding")
