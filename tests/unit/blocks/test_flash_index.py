"""What only the compiled index has: tables that are replaced, memory that is moved and given back, limits."""

import random
from array import array

import pytest

from kvbus_blocks.flash import index as flash
from kvbus_blocks.flash import layout
from kvbus_blocks.flash.index import FlashIndex, IndexFull
from kvbus_blocks.flash.memory import Memory
from kvbus_blocks.index import IndexSizes, Owner
from kvbus_blocks.keys import ShortKeys
from kvbus_blocks.plain_index import PlainIndex
from kvbus_testkit.flash import flash_index, kernels

A, B = Owner("a", "g1"), Owner("b", "g1")
# The inverse, modulo 2**64, of the number that keys are multiplied by to find their place.
UNSPREAD = pow(0x9E3779B97F4A7C15, -1, 1 << 64)


def random_keys(rng: random.Random, count: int) -> ShortKeys:
    return ShortKeys(rng.randbytes(16 * count))


def test_an_index_grows_through_many_tables_and_finds_everything_at_any_moment() -> None:
    index, rng = flash_index(), random.Random(1)
    chains = [random_keys(rng, 500) for _ in range(120)]
    for number, chain in enumerate(chains):
        index.store(A, None, chain)
        asked = rng.sample(chains[: number + 1], min(5, number + 1))
        assert all(index.match(known) == {A: 500} for known in asked)
    index.check_integrity()
    assert index.sizes() == IndexSizes(60_000, 60_000, 1, 0)


def test_one_call_may_be_larger_than_the_table_is() -> None:
    index, keys = flash_index(), random_keys(random.Random(2), 10 * layout.MIN_TABLE_SLOTS)
    assert index.store(A, None, keys).added == len(keys)
    assert index.match(keys) == {A: len(keys)}
    assert index.remove(A, keys) == len(keys)
    assert index.sizes() == IndexSizes(0, 0, 0, 0)
    index.check_integrity()


@pytest.mark.parametrize("length", [layout.CHUNK_KEYS - 1, layout.CHUNK_KEYS, layout.CHUNK_KEYS + 1])
def test_a_chain_that_is_cut_into_calls_stays_one_chain(length: int) -> None:
    index, keys = flash_index(), list(range(1, length + 1))
    assert index.store(A, 1, keys[1:]).orphans == length - 1
    assert index.store(B, None, keys).added == length
    assert index.match(keys) == {B: length}
    collides = [*keys[:-1], keys[-1] + 1, 5, 6]
    assert index.store(B, None, collides)._replace(added=0) == (0, 0, 2)
    index.check_integrity()


def test_keys_whose_places_and_tags_are_equal_are_told_apart() -> None:
    index = flash_index()
    keys = [((77 << 32) + low) * UNSPREAD % (1 << 64) for low in range(500)]
    index.store(A, None, keys)
    assert index.match(keys) == {A: 500}
    assert index.remove(A, keys[250:]) == 250
    assert index.match(keys) == {A: 250}
    index.check_integrity()


@pytest.mark.parametrize("owners", [63, 64, 65, 129, 1000])
def test_there_may_be_any_number_of_owners(owners: int) -> None:
    index, keys = flash_index(), list(range(1, 40))
    everyone = [Owner(f"w{number}", "g1") for number in range(owners)]
    for number, owner in enumerate(everyone):
        index.store(owner, None, keys[: number % 39 + 1])
    assert index.match(keys) == {owner: number % 39 + 1 for number, owner in enumerate(everyone)}
    for owner in everyone[1:]:
        index.drop(owner.instance_id)
    assert index.match(keys) == {everyone[0]: 1}
    assert index.sizes() == IndexSizes(1, 1, 1, 0)
    index.check_integrity()


def test_memory_is_given_back_after_churn() -> None:
    index, rng = flash_index(), random.Random(3)
    kept = random_keys(rng, 200)
    for number in range(60):
        index.store(A, None, random_keys(rng, 5000))
        if number == 30:
            index.store(B, None, kept)
    full = index.memory().size_bytes
    index.clear(A)
    for _ in range(1000):
        index.store(B, None, kept)
    assert index.memory().size_bytes < full / 4
    assert index.match(kept) == {B: 200}
    index.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_go_in_any_order_leave_what_the_plain_index_has(seed: int) -> None:
    """Many enough that what stays is moved together while prefixes of it are missing."""
    index, plain, rng = flash_index(), PlainIndex(), random.Random(seed)
    chains = [random_keys(rng, 600) for _ in range(30)]
    for _ in range(4):
        for owner in (A, B):
            for chain in rng.sample(chains, 20):
                assert index.store(owner, None, chain) == plain.store(owner, None, chain)
            held = list(plain.held(owner).keys)
            gone = array("Q", rng.sample(held, 9 * len(held) // 10))
            assert index.remove(owner, gone) == plain.remove(owner, gone)
        assert [dict(index.match(chain)) for chain in chains] == [plain.match(chain) for chain in chains]
        index.check_integrity()
    assert index.sizes() == plain.sizes()
    for owner in (A, B):
        assert index.clear(owner) == plain.clear(owner)


@pytest.mark.parametrize("keys_at_once", [500, 50_000])
def test_an_index_that_lost_everything_goes_on(keys_at_once: int) -> None:
    index, rng = flash_index(), random.Random(5)
    for _ in range(2):
        keys = random_keys(rng, 20_000)
        for first in range(0, len(keys), keys_at_once):
            index.store(A, None, keys[first : first + keys_at_once])
        index.clear(A)
        for _ in range(5):
            index.remove(A, keys)  # each call goes on giving back what nobody uses
        index.check_integrity()
    assert index.sizes() == IndexSizes(0, 0, 0, 0)
    index.store(A, None, keys)
    assert index.match(keys) == {A: 20_000}
    index.check_integrity()


def test_the_number_of_tombs_does_not_grow_with_what_comes_and_goes() -> None:
    index, rng = flash_index(), random.Random(4)
    for _ in range(200):
        keys = random_keys(rng, 500)
        index.store(A, None, keys)
        index.remove(A, keys)
    assert index.memory().size_bytes < 2 << 20
    index.check_integrity()


def test_a_block_that_one_owner_holds_takes_at_most_64_bytes() -> None:
    index, rng = flash_index(), random.Random(5)
    for _ in range(60):
        index.store(A, None, random_keys(rng, 5000))
    assert index.memory().size_bytes / index.sizes().blocks <= 64


def test_an_index_takes_as_many_blocks_as_it_was_made_for() -> None:
    index = FlashIndex(kernels(), max_blocks=100)
    index.store(A, None, range(1, 100))
    with pytest.raises(IndexFull) as full:
        index.store(B, 99, [100, 101])
    assert full.value.max_blocks == 100
    assert index.sizes() == IndexSizes(99, 99, 1, 0)
    index.remove(A, [99, 98])
    assert index.store(B, None, [1]).added == 1
    index.check_integrity()


def test_running_matches_hear_of_it_before_the_place_of_a_block_that_is_gone_is_used_again() -> None:
    """Else a match that has found the old block there would tell who holds the new one."""
    index = flash_index()
    index.store(A, None, [1, 2, 3])
    index.remove(A, [3])
    epoch = index._header[layout.EPOCH]
    index.store(A, 2, [4])
    assert index._header[layout.NODE_TOP] == layout.FIRST_NODE + 3, "the place is used again"
    assert index._header[layout.EPOCH] > epoch


@pytest.mark.parametrize("what", ["table", "sets", "width"])
def test_where_no_memory_can_be_had_changes_fail_and_the_index_stays_whole(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, rng = flash_index(), random.Random(6)
    chains = [random_keys(rng, {"table": layout.CHUNK_KEYS, "sets": 5, "width": 1}[what]) for _ in range(70)]
    owners = [A if what == "table" else Owner(f"w{n % 40 if what == 'sets' else n}", "g1") for n in range(70)]

    def refuse(size_bytes: int) -> Memory:
        raise MemoryError(size_bytes)

    monkeypatch.setattr(flash, "Memory", refuse)
    stored = []
    for owner, keys in zip(owners, chains, strict=True):
        try:
            stored += [(owner, keys)] if index.store(owner, None, keys).added else []
        except MemoryError:
            continue
    assert len(stored) < len(chains)
    assert all(owner in index.match(keys) for owner, keys in stored)
    monkeypatch.undo()
    for owner, keys in zip(owners, chains, strict=True):
        index.store(owner, None, keys)
    assert all(index.match(keys)[owner] == len(keys) for owner, keys in zip(owners, chains, strict=True))
    index.check_integrity()


def test_keys_cannot_be_resized_while_a_kernel_reads_them() -> None:
    keys = array("Q", range(100))
    _, _, alive = flash._words_of(keys)
    with pytest.raises(BufferError):
        keys.append(1)
    del alive
    keys.append(1)
