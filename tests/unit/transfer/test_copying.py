import secrets
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_transfer.copying import Pieces, address_of, copy_pieces
from kvbus_transfer.streaming import _compiled, fastest_copy

MEMORY = secrets.token_bytes(1 << 16)
COPY = fastest_copy()


def test_the_streaming_copy_compiles_here() -> None:
    pytest.importorskip("llvmlite")
    assert callable(_compiled())


@pytest.mark.parametrize("copy", [copy_pieces, COPY], ids=["memcpy", "streaming"])
@given(
    pieces=st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 4000), st.integers(0, 5000) | st.sampled_from([0, 255, 256, 257])
        ),
        max_size=6,
    )
)
def test_every_byte_arrives_and_no_other_changes(
    copy: Callable[[Pieces], None], pieces: list[tuple[int, int, int]]
) -> None:
    """Targets (one after the other, with gaps) and sources at any alignment."""
    target = bytearray(64_000)
    wanted = bytearray(64_000)
    to, source, at, native = address_of(target), address_of(MEMORY), 0, []
    for gap, start, length in pieces:
        at += gap
        native.append((to + at, source + start, length))
        wanted[at : at + length] = MEMORY[start : start + length]
        at += length
    copy(native)
    assert target == wanted


def test_what_is_not_contiguous_has_no_address() -> None:
    with pytest.raises(BufferError):
        address_of(memoryview(bytearray(8))[::2])
    with pytest.raises(TypeError):
        address_of(7)
