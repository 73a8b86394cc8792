"""The eviction order against a naive model: a list of blocks, scanned for the oldest free leaf."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus_blocks.eviction import EvictionOrder
from kvbus_blocks.keys import ROOT

numbers = st.integers(1, 31)


def name(number: int) -> bytes:
    return bytes([number]) if number else ROOT


class EvictionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder()
        self.now = 0
        self.used: dict[int, int] = {}
        self.pins: dict[int, int] = {}

    @rule(number=numbers)
    def insert(self, number: int) -> None:
        if number not in self.used:
            self.now += 1
            self.used[number], self.pins[number] = self.now, 0
            self.order.insert(name(number), name(number // 2))

    @rule(number=numbers)
    def touch_one(self, number: int) -> None:
        self.now += 1
        if number in self.used:
            self.used[number] = self.now
        self.order.touch([name(number)])

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        if number in self.used:
            self.pins[number] += 1
            self.order.pin(name(number))

    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        if self.pins.get(number):
            self.pins[number] -= 1
            self.order.unpin(name(number))

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        assert self.order.discard(name(number)) == (number in self.used)
        self.used.pop(number, None)
        self.pins.pop(number, None)

    @precondition(lambda self: self.used)
    @rule()
    def evict(self) -> None:
        parents = {number // 2 for number in self.used}
        candidates = [n for n in self.used if n not in parents and not self.pins[n]]
        expected = min(candidates, key=self.used.__getitem__, default=None)
        assert self.order.evict() == (None if expected is None else name(expected))
        if expected is not None:
            del self.used[expected], self.pins[expected]

    @invariant()
    def counts_hold(self) -> None:
        self.order.check_integrity()
        assert len(self.order) == len(self.used)
        assert self.order.evictable == sum(not pins for pins in self.pins.values())


TestEvictionAgainstTheModel = EvictionMachine.TestCase
TestEvictionAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
