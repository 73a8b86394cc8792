"""The eviction order and the caps against a naive model that looks at every block anew for each victim."""

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus_blocks.retention import KINDS, PLAIN, Directive, EvictionOrder, PinCaps, apply, directive, value

TENANTS = ["t", "u"]
CAPACITY, SHARE, TOTAL_SHARE = 10, 0.3, 0.5
said = st.tuples(
    st.sampled_from(["pinned", "pinned", "normal", "ephemeral"]),
    st.sampled_from([0, 0, 30, -30]),
    st.sampled_from([None, 1.0, 5.0, 20.0]),
    st.sampled_from(TENANTS),
)


@dataclass(eq=False)
class Block:
    key: int
    parent: "Block | None"
    depth: int
    directive: Directive = PLAIN
    used: int = 0
    uses: int = 0
    inflation: float = 0.0
    users: int = 0
    gone: bool = False
    children: set["Block"] = field(default_factory=set)

    @property
    def is_evictable(self) -> bool:
        return not self.gone and not self.users and not self.children


@dataclass
class Naive:
    """What was noted of a block, independently of the order."""

    base: float
    used: int
    uses: int


class RetentionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, Block] = {}
        self.order: EvictionOrder[Block] = EvictionOrder(lambda: len(self.blocks))
        self.caps = PinCaps(CAPACITY, SHARE, TOTAL_SHARE)
        self.naive: dict[int, Naive] = {}
        self.inflation = 0.0
        self.uses = 0
        self.made = 0
        self.now_s = 0.0

    @rule(data=st.data(), said=said, skip=st.sampled_from([1, 700, 3000]))
    def add(self, data: st.DataObject, said: tuple[str, int, float | None, str], skip: int) -> None:
        parent = data.draw(st.sampled_from([None, *self.blocks.values()]))
        self.made += 1
        depth = 0 if parent is None else parent.depth + skip
        block = self.blocks[self.made] = Block(self.made, parent, depth)
        if parent is not None:
            parent.children.add(block)
        block.directive, _ = apply(self.caps, block.key, None, directive(*said, self.now_s), self.now_s)
        self.naive[block.key] = Naive(0.0, 0, 0)
        self.note_use(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def use_the_prefix_of(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        self.note_use(block)

    def note_use(self, block: Block) -> None:
        self.uses += 1
        self.order.begin_use()
        above: Block | None = block
        while above is not None:
            self.order.use(above)
            noted = self.naive[above.key]
            noted.base, noted.used, noted.uses = self.inflation, self.uses, noted.uses + 1
            above = above.parent

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), said=said)
    def say(self, data: st.DataObject, said: tuple[str, int, float | None, str]) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        wanted = directive(*said, self.now_s)
        held = block.directive
        block.directive, refused = apply(self.caps, block.key, held, wanted, self.now_s)
        self.order.offer(block)
        if self.class_of(block.key, held) == "pinned" and (wanted.priority >= 0 or wanted.kind == "ephemeral"):
            assert block.directive.kind == "pinned"
            assert ends(block.directive) >= ends(held), "a pin is never shortened"
        if wanted.kind == "pinned":
            assert refused == (block.directive.kind != "pinned" or ends(block.directive) < ends(wanted))
        else:
            assert not refused

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), taken=st.booleans())
    def take_or_leave(self, data: st.DataObject, taken: bool) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        block.users = int(taken)
        self.order.offer(block)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), spare_pinned=st.booleans(), protect=st.booleans(), count=st.integers(1, 4))
    def evict(self, data: st.DataObject, spare_pinned: bool, protect: bool, count: int) -> None:
        for _ in range(min(count, len(self.blocks))):
            protected = data.draw(st.sampled_from(list(self.blocks.values()))) if protect else None
            expected = self.expected(protected, spare_pinned)
            victim = self.order.pop(self.now_s, protected, spare_pinned=spare_pinned)
            assert victim is expected
            if victim is None:
                return
            assert self.order.kind(victim) == self.class_of(victim.key, victim.directive)
            self.inflation = max(self.inflation, self.score(victim))
            self.remove(victim)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        for gone in [b for b in self.blocks.values() if under(b, block)][::-1]:
            self.remove(gone)

    def remove(self, block: Block) -> None:
        block.gone = True
        del self.blocks[block.key], self.naive[block.key]
        self.caps.forget(block.key)
        if block.parent is not None:
            block.parent.children.discard(block)
            self.order.offer(block.parent)

    def class_of(self, key: int, of: Directive) -> str:
        expired = of.expires_s is not None and of.expires_s <= self.now_s
        return "normal" if expired and of.kind == "pinned" else of.kind

    def score(self, block: Block) -> float:
        expired = block.directive.expires_s is not None and block.directive.expires_s <= self.now_s
        priority = 0 if expired and block.directive.kind != "ephemeral" else block.directive.priority
        noted = self.naive[block.key]
        return noted.base + value(Directive(priority=priority), block.depth, noted.uses)

    def expected(self, protected: Block | None, spare_pinned: bool) -> Block | None:
        ranks = {
            (
                KINDS.index(self.class_of(b.key, b.directive)),
                self.score(b),
                self.naive[b.key].used,
                b.key,
            ): b
            for b in self.blocks.values()
            if b.is_evictable and b is not protected
        }
        ranks = {rank: b for rank, b in ranks.items() if not spare_pinned or rank[0] < KINDS.index("pinned")}
        return ranks[min(ranks)] if ranks else None

    @invariant()
    def heaps_are_bounded_and_hold_what_may_go(self) -> None:
        assert len(self.order) <= 2 * len(self.blocks) + 64 + 1
        assert self.order.offered() == {b for b in self.blocks.values() if b.is_evictable}

    @invariant()
    def pins_are_counted_and_within_their_shares(self) -> None:
        self.caps.expire(self.now_s)
        living = [b for b in self.blocks.values() if self.class_of(b.key, b.directive) == "pinned"]
        assert len(self.caps) == len(living) <= CAPACITY * TOTAL_SHARE
        for tenant in TENANTS:
            assert self.caps.pinned(tenant) == sum(b.directive.tenant == tenant for b in living) <= CAPACITY * SHARE


def ends(of: Directive) -> float:
    return math.inf if of.expires_s is None else of.expires_s


def under(block: Block, top: Block) -> bool:
    above: Block | None = block
    while above is not None and above is not top:
        above = above.parent
    return above is top


RetentionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTheOrderAgainstANaiveModel = RetentionMachine.TestCase
