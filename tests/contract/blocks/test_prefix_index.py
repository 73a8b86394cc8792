from array import array
from collections.abc import Sequence

import pytest

from kvbus_blocks.index import IndexSizes, Owner, PrefixIndex, StoreOutcome
from kvbus_blocks.keys import ShortKeys
from kvbus_blocks.plain_index import PlainIndex
from kvbus_testkit.flash import flash_index

A, B = Owner("a", "g1"), Owner("b", "g1")
A2 = Owner("a", "g2")


@pytest.fixture(params=["plain", "flash"])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return PlainIndex() if request.param == "plain" else flash_index()


def test_depth_is_the_leading_part_that_is_held(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2, 3])
    index.store(B, None, [1, 2])
    index.store(A2, None, [1])
    assert index.match([1, 2, 3, 4]) == {A: 3, B: 2, A2: 1}
    assert index.match([9]) == {}
    assert index.match([]) == {}


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("held", [1, 2, 62, 63, 64, 65, 127, 128, 129, 999, 1000])
def test_the_jump_search_finds_every_end(index: PrefixIndex, length: int, held: int) -> None:
    index.store(A, None, range(1, held + 1))
    index.store(B, None, range(1, held // 2 + 2))
    chain = list(range(1, length + 1))
    assert index.match(chain) == {A: min(held, length), B: min(held // 2 + 1, length)}


def test_one_key_alone_tells_who_holds_everything_down_to_it(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2, 3])
    index.store(B, None, [1, 2])
    index.store(A2, 2, [3])
    assert set(index.match([2])) == {A, B}
    assert set(index.match([3])) == {A}
    assert not index.match([4])


def test_two_branches_below_one_parent_are_told_apart(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2, 3])
    index.store(A, 1, [20, 30])
    assert index.match([1, 20, 30]) == {A: 3}
    assert index.match([1, 2, 31]) == {A: 2}


def test_a_block_below_an_unknown_parent_is_not_found_until_the_parent_is_there(index: PrefixIndex) -> None:
    assert index.store(A, 1, [2, 3]) == StoreOutcome(added=2, orphans=2)
    assert index.match([1, 2, 3]) == {}
    assert index.sizes() == IndexSizes(blocks=2, entries=2, owners=1, orphans=2)
    index.store(B, None, [1])
    assert index.match([1, 2, 3]) == {B: 1}
    index.store(A, None, [1])
    assert index.match([1, 2, 3]) == {A: 3, B: 1}
    assert index.sizes().orphans == 0
    index.check_integrity()


def test_a_parent_evicted_before_its_child_and_stored_again_makes_the_child_count_again(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2, 3, 4])
    assert index.remove(A, [2]) == 1
    assert index.match([1, 2, 3, 4]) == {A: 1}
    index.check_integrity()
    index.store(A, 1, [2])
    assert index.match([1, 2, 3, 4]) == {A: 4}
    index.check_integrity()


def test_storing_twice_changes_nothing(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2])
    assert index.store(A, None, [1, 2]) == StoreOutcome()
    assert index.sizes() == IndexSizes(blocks=2, entries=2, owners=1, orphans=0)


def test_removing_what_is_not_held_is_ignored(index: PrefixIndex) -> None:
    assert index.remove(A, [1]) == 0
    index.store(B, None, [1])
    index.store(A, None, [7])
    assert index.remove(A, [1]) == 0
    assert index.match([1]) == {B: 1}


def test_a_key_that_collides_with_one_elsewhere_is_refused_with_what_follows(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2, 3])
    assert index.store(B, 7, [3, 4]) == StoreOutcome(collisions=2)
    assert index.store(B, 5, [5]) == StoreOutcome(collisions=1)
    assert index.match([1, 2, 3]) == {A: 3}
    assert index.sizes().owners == 1
    index.check_integrity()


def test_clearing_one_tier_leaves_the_other(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2])
    index.store(A2, None, [1, 2])
    assert index.clear(A) == 2
    assert index.match([1, 2]) == {A2: 2}
    assert index.clear(A) == 0


def test_dropping_an_instance_forgets_all_its_tiers_and_nothing_else(index: PrefixIndex) -> None:
    for owner in (A, A2, B):
        index.store(owner, None, [1, 2])
    index.store(A, 50, [51])
    assert index.drop("a") == 5
    assert index.match([1, 2]) == {B: 2}
    assert index.drop("b") == 2
    assert index.sizes() == IndexSizes(0, 0, 0, 0)
    index.check_integrity()


def test_a_slot_of_a_dropped_owner_is_reused_without_its_blocks(index: PrefixIndex) -> None:
    for round_ in range(100):
        owner = Owner(f"w{round_}", "g1")
        index.store(owner, None, [1, 2])
        assert index.match([1, 2]) == {owner: 2}
        index.drop(owner.instance_id)
    index.check_integrity()


def test_a_chain_evicted_from_its_root_leaves_no_memory_behind(index: PrefixIndex) -> None:
    index.store(A, None, range(1, 1001))
    index.remove(A, range(1, 1000))
    assert index.sizes() == IndexSizes(blocks=1, entries=1, owners=1, orphans=1)
    index.check_integrity()
    index.remove(A, [1000])
    assert index.sizes() == IndexSizes(0, 0, 0, 0)


def test_many_distinct_sets_of_owners_stay_right_when_sharing_starts_anew(index: PrefixIndex) -> None:
    owners = [Owner(f"w{i}", "g1") for i in range(13)]
    expected: dict[int, set[Owner]] = {}
    for key in range(1, 6000):
        expected[key] = {owner for i, owner in enumerate(owners) if key >> i & 1}
        for owner in expected[key]:
            index.store(owner, None, [key])
    assert all(set(index.match([key])) == holders for key, holders in expected.items())


def test_what_an_owner_holds_is_told_with_its_parents(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2])
    index.store(A, 7, [8])
    index.store(B, 1, [3])
    keys, parents = index.held(A)
    assert dict(zip(keys, parents, strict=True)) == {1: 1, 2: 1, 8: 7}
    assert sorted(index.owners()) == [A, B]
    assert list(index.held(A2).keys) == []


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_any_64_bits_are_a_key(index: PrefixIndex, key: int) -> None:
    assert index.store(A, None, [key, 5]) == StoreOutcome(added=2)
    assert index.store(A, key, [6]) == StoreOutcome(added=1)
    assert index.match([key, 6]) == {A: 2}
    assert dict(zip(*index.held(A), strict=True)) == {key: key, 5: key, 6: key}
    assert index.remove(A, [key]) == 1
    assert index.match([key, 5]) == {}
    index.check_integrity()


@pytest.mark.parametrize("keys", [[-1], [1 << 64]])
def test_what_is_no_64_bits_is_refused(keys: list[int]) -> None:
    with pytest.raises(OverflowError):
        flash_index().store(A, None, keys)


def test_keys_come_in_any_kind_of_sequence(index: PrefixIndex) -> None:
    numbers = [3 << 62, 7, 9]
    packed = ShortKeys(b"".join(number.to_bytes(8, "little") + b"further " for number in numbers))
    kinds: list[Sequence[int]] = [numbers, tuple(numbers), array("Q", numbers), packed]
    for kind in kinds:
        assert index.store(A, None, kind) == StoreOutcome(added=3)
        assert index.match(kind) == {A: 3}
        assert index.remove(A, kind) == 3


def test_keys_in_a_chain_may_not_repeat(index: PrefixIndex) -> None:
    assert index.store(A, None, [1, 2, 2, 3]) == StoreOutcome(added=2, collisions=2)
    assert index.store(A, 9, [9, 10]) == StoreOutcome(collisions=2)
    assert index.store(A, 2, [1]) == StoreOutcome(collisions=1)
    assert index.sizes() == IndexSizes(2, 2, 1, 0)
    index.check_integrity()


def test_orphans_that_hang_in_a_circle_are_kept_and_found_by_nobody(index: PrefixIndex) -> None:
    index.store(A, 1, [2])
    index.store(A, 2, [1])
    assert index.match([1, 2]) == {}
    assert index.sizes() == IndexSizes(blocks=2, entries=2, owners=1, orphans=2)
    index.check_integrity()
    assert index.clear(A) == 2
    assert index.sizes() == IndexSizes(0, 0, 0, 0)
    index.check_integrity()


def test_a_subtree_of_orphans_is_reached_at_once_and_lost_at_once(index: PrefixIndex) -> None:
    """Two levels of branches below a parent that comes last, of which another owner holds some, too."""
    for branch in range(10, 14):
        index.store(A, 2, [branch])
        index.store(A, branch, [10 * branch, 10 * branch + 1])
        index.store(B, branch, [10 * branch + 5])
    assert index.sizes().orphans == 16
    index.store(A, None, [1, 2])
    assert index.sizes().orphans == 4
    assert all(index.match([1, 2, n, 10 * n, 10 * n + 1]) == {A: 5} for n in range(10, 14))
    index.remove(A, [2])
    assert index.sizes().orphans == 16
    assert index.match([1, 2, 10]) == {A: 1}
    index.check_integrity()


def test_memory_is_told(index: PrefixIndex) -> None:
    index.store(A, None, [1, 2])
    index.store(B, None, [1])
    memory = index.memory()
    assert memory.size_bytes > 0
    assert memory.owner_sets >= 2
