from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_runtime.parts import (
    HEADER_BYTES,
    HEADER_ID,
    HEADER_PART,
    Assembler,
    PartLimits,
    PartsRefused,
    part_headers,
    split,
)

LIMITS = PartLimits(message_bytes=100, total_bytes=150, assemblies=3, age_s=10)


def sent(parts_id: str, data: bytes, size: int) -> list[tuple[Mapping[str, str], bytes]]:
    parts = split(data, size)
    return [(part_headers(parts_id, i, len(parts), len(data)), bytes(part)) for i, part in enumerate(parts)]


@given(st.binary(min_size=1, max_size=100), st.integers(1, 100), st.randoms(use_true_random=False))
def test_parts_in_any_order_with_duplicates_become_the_message_once(data: bytes, size: int, random: object) -> None:
    parts = sent("a", data, size)
    shuffled = list(parts[:-1]) + list(parts[:-1])
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assembler = Assembler(LIMITS)
    for headers, part in shuffled:
        assert assembler.add(headers, part, 0.0) is None
        assembler.check_integrity()
    assert assembler.add(*parts[-1], 0.0) == data
    assert (assembler.open_count, assembler.reserved_bytes) == (0, 0)


def test_a_message_above_the_limit_is_refused_at_its_first_part() -> None:
    assembler = Assembler(LIMITS)
    with pytest.raises(PartsRefused) as refused:
        assembler.add(part_headers("a", 0, 2, 101), b"x", 0.0)
    assert refused.value.reason == "too_large"
    assert assembler.open_count == 0


def test_a_message_of_exactly_the_limit_is_taken() -> None:
    assembler = Assembler(LIMITS)
    (first, last) = sent("a", b"x" * 100, 50)
    assert assembler.add(*first, 0.0) is None
    assert assembler.add(*last, 0.0) == b"x" * 100


def test_too_many_bytes_at_once_are_refused_until_room_is_there() -> None:
    assembler = Assembler(LIMITS)
    first = sent("a", b"x" * 100, 50)
    assembler.add(*first[0], 0.0)
    with pytest.raises(PartsRefused) as refused:
        assembler.add(part_headers("b", 0, 2, 51), b"x", 0.0)
    assert refused.value.reason == "too_many"
    assembler.add(part_headers("c", 0, 2, 50), b"x", 0.0)
    assembler.add(*first[1], 0.0)
    assembler.add(part_headers("b", 0, 2, 51), b"x", 0.0)
    assembler.check_integrity()


def test_too_many_messages_at_once_are_refused() -> None:
    assembler = Assembler(LIMITS)
    for parts_id in "abc":
        assembler.add(part_headers(parts_id, 0, 2, 2), b"x", 0.0)
    with pytest.raises(PartsRefused) as refused:
        assembler.add(part_headers("d", 0, 2, 2), b"x", 0.0)
    assert refused.value.reason == "too_many"


def test_a_message_without_new_parts_is_forgotten_after_its_age() -> None:
    assembler = Assembler(LIMITS)
    (first, last) = sent("a", b"xy", 1)
    assembler.add(*first, 0.0)
    assert assembler.expire(10.0) == 0
    assert assembler.expire(10.1) == 1
    assert assembler.reserved_bytes == 0
    assert assembler.add(*last, 10.2) is None


@pytest.mark.parametrize(
    "headers",
    [
        {HEADER_ID: "a"},
        {HEADER_ID: "a", HEADER_PART: "x", HEADER_BYTES: "1"},
        {HEADER_ID: "a", HEADER_PART: "1/1", HEADER_BYTES: "1"},
        {HEADER_ID: "a", HEADER_PART: "-1/1", HEADER_BYTES: "1"},
        {HEADER_ID: "a", HEADER_PART: "0/2", HEADER_BYTES: "1"},
        {HEADER_ID: "a", HEADER_PART: "0/1", HEADER_BYTES: "0"},
        {HEADER_ID: "a", HEADER_PART: "0/1", HEADER_BYTES: "many"},
        {HEADER_ID: "a", HEADER_PART: "0/1000000000", HEADER_BYTES: "10"},
    ],
)
def test_headers_that_make_no_sense_are_refused(headers: dict[str, str]) -> None:
    assembler = Assembler(LIMITS)
    with pytest.raises(PartsRefused) as refused:
        assembler.add(headers, b"x", 0.0)
    assert refused.value.reason == "broken"
    assembler.check_integrity()


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        (part_headers("a", 1, 3, 4), b"xx"),
        (part_headers("a", 1, 2, 5), b"xx"),
        (part_headers("a", 1, 2, 4), b"xxx"),
        (part_headers("a", 1, 2, 4), b"x"),
    ],
)
def test_parts_that_disagree_are_refused_and_forgotten(headers: dict[str, str], data: bytes) -> None:
    assembler = Assembler(LIMITS)
    assembler.add(part_headers("a", 0, 2, 4), b"xx", 0.0)
    with pytest.raises(PartsRefused):
        assembler.add(headers, data, 0.0)
    assert assembler.open_count == 0
    assembler.check_integrity()
