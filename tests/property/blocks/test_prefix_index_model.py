"""The prefix index against a naive model: per owner a plain set of keys, and a walk for each query."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_blocks.index import Owner, PrefixIndex
from kvbus_blocks.plain_index import PlainIndex
from kvbus_testkit.flash import flash_index
from kvbus_testkit.instances import chain_to

OWNERS = [Owner(instance, tier) for instance in "abc" for tier in ("g1", "g2")]
owners = st.sampled_from(OWNERS)
# Of the tree of `chain_to`, in which every key has one parent and up to two children.
DEEPEST = 127
some_keys = st.lists(st.integers(1, DEEPEST), min_size=1, max_size=20)


class IndexMachine(RuleBasedStateMachine):
    make_index: Callable[[], PrefixIndex]

    def __init__(self) -> None:
        super().__init__()
        self.index = self.make_index()
        self.held: dict[Owner, set[int]] = {owner: set() for owner in OWNERS}

    @rule(owner=owners, leaf=st.integers(1, DEEPEST), skip=st.integers(0, 6))
    def store(self, owner: Owner, leaf: int, skip: int) -> None:
        chain = chain_to(leaf)
        skip = min(skip, len(chain) - 1)
        keys = chain[skip:]
        outcome = self.index.store(owner, chain[skip - 1] if skip else None, keys)
        new = set(keys) - self.held[owner]
        reachable = self.held[owner].issuperset(chain[:skip])
        assert outcome == (len(new), 0 if reachable else len(keys), 0)
        self.held[owner] |= new

    @rule(owner=owners, keys=some_keys)
    def remove(self, owner: Owner, keys: list[int]) -> None:
        assert self.index.remove(owner, keys) == len(self.held[owner].intersection(keys))
        self.held[owner].difference_update(keys)

    @rule(owner=owners)
    def clear(self, owner: Owner) -> None:
        assert self.index.clear(owner) == len(self.held[owner])
        self.held[owner].clear()

    @rule(instance=st.sampled_from("abc"))
    def drop(self, instance: str) -> None:
        mine = [owner for owner in OWNERS if owner.instance_id == instance]
        assert self.index.drop(instance) == sum(len(self.held[owner]) for owner in mine)
        for owner in mine:
            self.held[owner].clear()

    @rule(leaf=st.integers(1, 4 * DEEPEST))
    def match(self, leaf: int) -> None:
        chain = chain_to(leaf)
        expected = {}
        for owner in OWNERS:
            depth = 0
            while depth < len(chain) and chain[depth] in self.held[owner]:
                depth += 1
            if depth:
                expected[owner] = depth
        assert self.index.match(chain) == expected

    @rule()
    def copy(self) -> None:
        """What `held` tells makes the same index again, in whatever order it is stored."""
        assert set(self.index.owners()) == {owner for owner in OWNERS if self.held[owner]}
        twin = self.make_index()
        for owner in OWNERS:
            keys, parents = self.index.held(owner)
            assert dict(zip(keys, parents, strict=True)) == {key: key // 2 or key for key in self.held[owner]}
            for key, parent in zip(keys, parents, strict=True):
                twin.store(owner, None if parent == key else parent, [key])
        twin.check_integrity()
        assert twin.sizes() == self.index.sizes()
        for leaf in range(DEEPEST // 2 + 1, DEEPEST + 1):
            assert twin.match(chain_to(leaf)) == self.index.match(chain_to(leaf))

    @invariant()
    def sizes_and_invariants_hold(self) -> None:
        self.index.check_integrity()
        sizes = self.index.sizes()
        assert sizes.blocks == len(set().union(*self.held.values()))
        assert sizes.entries == sum(map(len, self.held.values()))
        assert sizes.owners == sum(map(bool, self.held.values()))
        assert sizes.orphans == sum(
            not self.held[owner].issuperset(chain_to(key)) for owner in OWNERS for key in self.held[owner]
        )


class PlainMachine(IndexMachine):
    make_index = staticmethod(PlainIndex)


class FlashMachine(IndexMachine):
    make_index = staticmethod(flash_index)


class TwoIndexes(RuleBasedStateMachine):
    """The compiled index and the plain one do and tell the same, whatever is done to them; chains may contradict others."""

    def __init__(self) -> None:
        super().__init__()
        self.flash = flash_index()
        self.plain = PlainIndex()

    @rule(owner=owners, parent=st.none() | st.integers(0, 30), keys=st.lists(st.integers(0, 30), max_size=12))
    def store(self, owner: Owner, parent: int | None, keys: list[int]) -> None:
        assert self.flash.store(owner, parent, keys) == self.plain.store(owner, parent, keys)

    @rule(owner=owners, keys=st.lists(st.integers(0, 30), max_size=12))
    def remove(self, owner: Owner, keys: list[int]) -> None:
        assert self.flash.remove(owner, keys) == self.plain.remove(owner, keys)

    @rule(owner=owners)
    def clear(self, owner: Owner) -> None:
        assert self.flash.clear(owner) == self.plain.clear(owner)

    @rule(instance=st.sampled_from("abc"))
    def drop(self, instance: str) -> None:
        assert self.flash.drop(instance) == self.plain.drop(instance)

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        """A chain that is stored: of others both may tell anything."""
        held = self.plain.held(data.draw(owners))
        parents = dict(zip(held.keys, held.parents, strict=True))
        chain: list[int] = []
        key = data.draw(st.sampled_from(sorted(parents))) if parents else 0
        while key in parents and key not in chain:
            chain.append(key)
            key = parents[key]
        assert self.flash.match(chain[::-1]) == self.plain.match(chain[::-1])

    @invariant()
    def both_tell_the_same(self) -> None:
        assert self.flash.sizes() == self.plain.sizes()
        assert sorted(self.flash.owners()) == sorted(self.plain.owners())
        self.flash.check_integrity()
        self.plain.check_integrity()
        for owner in OWNERS:
            assert sorted(zip(*self.flash.held(owner), strict=True)) == sorted(
                zip(*self.plain.held(owner), strict=True)
            )


TestPlainIndexAgainstTheModel = PlainMachine.TestCase
TestFlashIndexAgainstTheModel = FlashMachine.TestCase
TestFlashIndexAgainstThePlainOne = TwoIndexes.TestCase
TestPlainIndexAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFlashIndexAgainstTheModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestFlashIndexAgainstThePlainOne.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
