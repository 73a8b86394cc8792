import math
from dataclasses import dataclass

import pytest

from kvbus_blocks.retention import (
    MAX_PRIORITY,
    MAX_TTL_S,
    PLAIN,
    REFUSED_PIN_PRIORITY,
    Directive,
    EvictionOrder,
    PinCaps,
    apply,
    demotable,
    directive,
    effective,
    merge,
    shifted,
)

PIN = Directive("pinned", 0, 100.0, "t")
EPHEMERAL = Directive("ephemeral")
VALUED = Directive("normal", 30)
DEVALUED = Directive("normal", -30)


@dataclass(eq=False)
class Leaf:
    key: str
    depth: int = 0
    directive: Directive = PLAIN
    used: int = 0
    uses: int = 0
    inflation: float = 0.0
    is_evictable: bool = True


class Room:
    """An order with the blocks it evicts from."""

    def __init__(self, *, lru: bool = False) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.order: EvictionOrder[Leaf] = EvictionOrder(lambda: len(self.leaves), lru=lru)

    def add(self, key: str, of: Directive = PLAIN, depth: int = 0, uses: int = 1) -> Leaf:
        leaf = self.leaves[key] = Leaf(key, depth, of)
        self.order.begin_use()
        for _ in range(uses):
            self.order.use(leaf)
        return leaf

    def evict(self, now_s: float = 0.0, *, spare_pinned: bool = False) -> str | None:
        leaf = self.order.pop(now_s, spare_pinned=spare_pinned)
        if leaf is None:
            return None
        leaf.is_evictable = False
        del self.leaves[leaf.key]
        return leaf.key

    def evict_all(self, now_s: float = 0.0) -> str:
        return "".join(iter(lambda: self.evict(now_s) or "", ""))


@pytest.mark.parametrize(
    ("held", "said", "result"),
    [
        (None, EPHEMERAL, EPHEMERAL),
        (None, PIN, PIN),
        (PIN, PLAIN, PIN),
        (PIN, EPHEMERAL, PIN),
        (PIN, VALUED, Directive("pinned", 30, 100.0, "t")),
        (PIN, DEVALUED, DEVALUED),
        (PIN, Directive("pinned", 5, 200.0, "u"), Directive("pinned", 5, 200.0, "u")),
        (PIN, Directive("pinned", 5, 50.0, "u"), Directive("pinned", 5, 100.0, "t")),
        (PIN, Directive("pinned", 0, None, "u"), Directive("pinned", 0, None, "u")),
        (EPHEMERAL, PLAIN, PLAIN),
        (EPHEMERAL, EPHEMERAL, EPHEMERAL),
        (EPHEMERAL, VALUED, VALUED),
        (VALUED, PLAIN, VALUED),
        (VALUED, EPHEMERAL, VALUED),
        (VALUED, DEVALUED, DEVALUED),
        (PLAIN, EPHEMERAL, PLAIN),
    ],
)
def test_what_the_users_of_a_block_say_is_merged(held: Directive | None, said: Directive, result: Directive) -> None:
    assert merge(held, said, 0.0) == result


def test_an_expired_pin_is_as_nothing_to_the_next_user() -> None:
    assert merge(PIN, PLAIN, 100.0) == PLAIN
    assert merge(PIN, VALUED, 100.0) == VALUED
    assert merge(PIN, EPHEMERAL, 100.0) == PLAIN


def test_an_ephemeral_block_stays_one_when_its_directive_expires() -> None:
    short = Directive("ephemeral", 0, 5.0)
    assert effective(short, 10.0) == short
    assert not demotable(short)
    assert demotable(PIN)


@pytest.mark.parametrize("ttl_s", [1e300, math.inf, MAX_TTL_S + 1])
def test_any_ttl_of_a_user_is_cut_to_the_longest(ttl_s: float) -> None:
    assert directive("pinned", 10**30, ttl_s, "t", 7.0) == Directive("pinned", MAX_PRIORITY, 7.0 + MAX_TTL_S, "t")


def test_a_pin_without_a_ttl_lasts_the_longest_and_a_priority_for_good() -> None:
    assert directive("pinned", 0, None, "t", 7.0).expires_s == 7.0 + MAX_TTL_S
    assert directive("normal", -(10**30), None, "t", 7.0) == Directive("normal", -MAX_PRIORITY, None, "t")


@pytest.mark.parametrize(("kind", "ttl_s"), [("forever", 1.0), ("pinned", math.nan), ("pinned", -1.0)])
def test_a_directive_without_sense_is_refused(kind: str, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=r"retention|ttl"):
        directive(kind, 0, ttl_s, "", 0.0)


def test_a_directive_moves_between_clocks() -> None:
    assert shifted(PIN, 1000.0).expires_s == 1100.0
    assert shifted(VALUED, 1000.0) == VALUED


def test_ephemeral_blocks_go_first_and_pinned_ones_last() -> None:
    room = Room()
    room.add("p", PIN)
    room.add("n")
    room.add("e", EPHEMERAL, depth=9000, uses=50)
    assert room.evict_all() == "enp"


def test_pinned_blocks_can_be_spared() -> None:
    room = Room()
    room.add("p", PIN)
    room.add("n")
    assert [room.evict(spare_pinned=True) for _ in range(2)] == ["n", None]
    assert room.evict() == "p"


def test_an_expired_pin_goes_in_its_turn() -> None:
    room = Room()
    room.add("p", PIN)
    room.add("n")
    room.add("q", Directive("pinned", 0, 500.0))
    assert room.evict_all(now_s=100.0) == "pnq"


def test_an_expired_priority_is_worth_nothing() -> None:
    room = Room()
    room.add("v", Directive("normal", 50, 10.0))
    room.add("n")
    room.add("w", Directive("normal", 50, 20.0))
    assert room.evict(now_s=5.0) == "n"
    room.add("m")
    assert room.evict(now_s=10.0) == "v"


def test_a_pin_that_is_renewed_stays_beyond_its_first_end() -> None:
    room = Room()
    leaf = room.add("p", PIN)
    leaf.directive = merge(leaf.directive, Directive("pinned", 0, 300.0, "t"), 50.0)
    room.order.offer(leaf)
    room.add("n")
    assert room.evict_all(now_s=200.0) == "np"


def test_value_counts_priority_reuse_and_depth() -> None:
    room = Room()
    room.add("a", VALUED)
    room.add("b", uses=4)
    room.add("c", depth=2048)
    room.add("d", DEVALUED)
    room.add("e")
    assert room.evict_all() == "debac"


def test_equal_blocks_go_by_their_last_use() -> None:
    room = Room()
    for key in "cab":
        room.add(key)
    assert room.evict_all() == "cab"


def test_what_is_not_used_goes_in_the_end_however_much_it_was_worth() -> None:
    room = Room()
    room.add("old", Directive("normal", 50), depth=500, uses=3)
    evicted: list[str | None] = []
    for i in range(40):
        room.add(f"x{i}")
        evicted.append(room.evict())
    assert "old" in evicted


def test_without_retention_the_least_recently_used_goes_first() -> None:
    room = Room(lru=True)
    room.add("p", PIN)
    room.add("n", uses=5, depth=5000)
    room.add("e", EPHEMERAL)
    assert room.evict_all() == "pne"


def test_the_heaps_stay_bounded_however_often_blocks_are_offered() -> None:
    room = Room()
    leaves = [room.add(str(i), Directive("pinned", 0, 50.0 + i)) for i in range(10)]
    for i in range(2000):
        leaf = leaves[i % 10]
        leaf.directive = Directive("pinned", 0, 100.0 + i)
        room.order.offer(leaf)
        assert len(room.order) <= 2 * 10 + 64
    assert len(room.order.offered()) == 10


def test_a_tenant_gets_pins_up_to_its_share() -> None:
    caps = PinCaps(capacity=10, share=0.2)
    pins = [caps.grant(i, PIN, 0.0) for i in range(3)]
    assert [pin.kind for pin in pins] == ["pinned", "pinned", "normal"]
    assert (pins[2].priority, pins[2].expires_s) == (REFUSED_PIN_PRIORITY, 100.0)
    assert caps.grant(3, Directive("pinned", 0, 100.0, "other"), 0.0).kind == "pinned"
    assert (caps.pinned("t"), caps.pinned("other")) == (2, 1)


def test_all_tenants_together_leave_room_for_others() -> None:
    caps = PinCaps(capacity=10, share=0.2, total_share=0.5)
    kinds = [caps.grant(i, Directive("pinned", 0, 100.0, f"t{i}"), 0.0).kind for i in range(7)]
    assert kinds == ["pinned"] * 5 + ["normal"] * 2


def test_a_pin_that_ends_gives_its_place_back() -> None:
    caps = PinCaps(capacity=10, share=0.2)
    caps.grant(0, PIN, 0.0)
    caps.grant(1, Directive("pinned", 0, 300.0, "t"), 0.0)
    caps.forget(0)
    assert caps.grant(2, PIN, 0.0).kind == "pinned"
    assert caps.grant(3, PIN, 99.0).kind == "normal"
    assert caps.grant(3, Directive("pinned", 0, 200.0, "t"), 100.0).kind == "pinned"
    assert len(caps) == 2


def test_a_renewed_pin_counts_once() -> None:
    caps = PinCaps(capacity=10, share=0.2)
    for i in range(500):
        assert caps.grant(0, Directive("pinned", 0, 100.0 + i, "t"), 0.0).kind == "pinned"
    assert (len(caps), caps.pinned("t")) == (1, 1)
    assert len(caps._expiries) <= 66
    caps.expire(598.0)
    assert len(caps) == 1
    caps.expire(599.0)
    assert len(caps) == 0


def test_a_refused_pin_is_reported_and_a_living_one_is_not_lost_for_it() -> None:
    caps = PinCaps(capacity=10, share=0.1)
    held, refused = apply(caps, "a", None, PIN, 0.0)
    assert (held, refused) == (PIN, False)
    other = Directive("pinned", 0, 900.0, "u")
    assert apply(caps, "b", None, other, 0.0) == (other, False)
    assert apply(caps, "a", held, other, 0.0) == (PIN, True), "the longer pin is above the share of its tenant"
    assert (caps.pinned("t"), caps.pinned("u")) == (1, 1)
    assert apply(caps, "a", held, Directive("pinned", 0, 50.0, "u"), 0.0) == (PIN, False), "it lasts long enough"
    degraded, refused = apply(caps, "c", None, other, 0.0)
    assert (degraded.kind, refused) == ("normal", True)
    assert apply(caps, "a", held, DEVALUED, 0.0) == (DEVALUED, False)
    assert caps.pinned("t") == 0
