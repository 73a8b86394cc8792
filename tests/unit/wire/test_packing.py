import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_wire.packing import pack_keys, pack_tokens, short_key, short_keys, unpack_keys, unpack_tokens

keys = st.binary(min_size=16, max_size=16)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_come_back(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_tokens_are_little_endian_u32() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        unpack_tokens(b"\x00" * 6)


@given(st.lists(keys))
def test_keys_come_back(values: list[bytes]) -> None:
    packed = pack_keys(values)
    assert unpack_keys(packed) == values
    assert list(short_keys(packed)) == [short_key(key) for key in values]


@pytest.mark.parametrize("unpack", [unpack_keys, short_keys])
def test_half_a_key_is_refused(unpack: object) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"\x00" * 24)  # type: ignore[operator]


def test_the_short_key_is_the_low_half() -> None:
    assert short_key(bytes(range(16))) == 0x0706050403020100
