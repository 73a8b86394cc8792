import pytest

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.disk_records import RECORD_BYTES, Gone, Kept, Record, decode, decode_all, encode

KEY, PARENT = b"k" * 16, b"p" * 16
RECORDS: list[Record] = [
    Gone(KEY),
    Kept(KEY, b"", 0, 0, 0, 0),
    Kept(KEY, PARENT, (1 << 32) - 1, (1 << 64) - 1, 7, 9, Directive("pinned", -5, 1e300, "tenant ü")),
    Kept(KEY, PARENT, 3, 4, 7, 9, Directive("ephemeral", 100, None, "t" * 128)),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data = encode(record)
    assert len(data) == RECORD_BYTES
    assert decode(data) == record


@pytest.mark.parametrize("record", RECORDS)
def test_no_flipped_bit_goes_unnoticed(record: Record) -> None:
    data = bytearray(encode(record))
    for bit in range(0, RECORD_BYTES * 8, 5):
        data[bit // 8] ^= 1 << bit % 8
        assert decode(data) is None
        data[bit // 8] ^= 1 << bit % 8
    assert decode(data) == record


def test_damage_costs_one_record_and_a_cut_the_last() -> None:
    data = bytearray(b"".join(map(encode, RECORDS)))
    data[RECORD_BYTES + 50] ^= 1
    assert list(decode_all(data[:-1])) == [RECORDS[0], None, RECORDS[2], None]


def test_a_long_name_of_a_tenant_becomes_a_hash_that_tells_tenants_apart() -> None:
    first = Kept(KEY, b"", 0, 0, 0, 0, Directive("pinned", 0, None, "t" * 129))
    second = Kept(KEY, b"", 0, 0, 0, 0, Directive("pinned", 0, None, "t" * 130))
    again = [decode(encode(record)) for record in (first, second, first)]
    assert again[0] == again[2] != again[1]


def test_a_priority_out_of_range_is_cut() -> None:
    found = decode(encode(Kept(KEY, b"", 0, 0, 0, 0, Directive("normal", 1 << 70))))
    assert isinstance(found, Kept)
    assert found.directive.priority == (1 << 31) - 1
