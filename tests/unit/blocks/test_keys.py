from array import array
from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_blocks.keys import KEY_BYTES, ROOT, CacheDomain, chain_keys

DOMAIN = CacheDomain(model_fingerprint="f", block_size=4, kv_layout="l")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def test_the_first_key_is_as_documented() -> None:
    domain = blake2b(msgspec.msgpack.encode(("f", 4, "l", "", "")), digest_size=32, person=b"kvbus.block.v1").digest()
    block = packed([1, 2, 3, 4])
    expected = blake2b(block, digest_size=16, key=domain, person=b"kvbus.block.v1").digest()
    assert DOMAIN.key() == domain
    assert chain_keys(DOMAIN.key(), block, 4) == [expected]


def test_keys_never_change_between_versions() -> None:
    # These bytes name blocks on disks and in other processes; a change of the formula needs a new person string.
    assert DOMAIN.key().hex() == "4b6000d07c547768c3feb3306db08d87191dc79fd91251aa18e3f590132fc883"
    keys = chain_keys(DOMAIN.key(), packed(list(range(8))), 4)
    assert [key.hex() for key in keys] == [
        "3ce5764c815a40a7f4bbf1518bb10d68",
        "f1aa0bd8fabf3a2ddab26e592a020850",
    ]


@given(tokens)
def test_there_is_one_key_per_whole_block(ids: list[int]) -> None:
    keys = chain_keys(DOMAIN.key(), packed(ids), 4)
    assert len(keys) == len(ids) // 4
    assert all(len(key) == KEY_BYTES for key in keys)


@given(tokens, st.integers(0, 10))
def test_a_chain_can_be_continued_at_any_block(ids: list[int], blocks: int) -> None:
    whole = chain_keys(DOMAIN.key(), packed(ids), 4)
    head = whole[:blocks]
    parent = head[-1] if head else ROOT
    assert head + chain_keys(DOMAIN.key(), packed(ids)[len(head) * 16 :], 4, parent) == whole


@given(tokens, st.data())
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(
    ids: list[int], data: st.DataObject
) -> None:
    whole_blocks = len(ids) // 4
    if not whole_blocks:
        return
    at = data.draw(st.integers(0, whole_blocks * 4 - 1))
    other = list(ids)
    other[at] ^= 1
    before = chain_keys(DOMAIN.key(), packed(ids), 4)
    after = chain_keys(DOMAIN.key(), packed(other), 4)
    assert [one == two for one, two in zip(before, after, strict=True)] == [i < at // 4 for i in range(whole_blocks)]


def test_a_memoryview_gives_the_same_keys() -> None:
    data = packed(list(range(12)))
    assert chain_keys(DOMAIN.key(), memoryview(data), 4) == chain_keys(DOMAIN.key(), data, 4)


@pytest.mark.parametrize(
    "change",
    [{"model_fingerprint": "g"}, {"block_size": 8}, {"kv_layout": "k"}, {"lora": "a"}, {"salt": "tenant"}],
)
def test_every_part_of_the_cache_domain_separates(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(DOMAIN, **change)
    assert other.key() != DOMAIN.key()
    assert chain_keys(other.key(), packed([1, 2, 3, 4]), 4) != chain_keys(DOMAIN.key(), packed([1, 2, 3, 4]), 4)


def test_fields_of_the_domain_do_not_run_into_each_other() -> None:
    one = CacheDomain(model_fingerprint="ab", block_size=4, kv_layout="c")
    other = CacheDomain(model_fingerprint="a", block_size=4, kv_layout="bc")
    assert one.key() != other.key()
