from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus_transfer import GrantRefused, LeaseEnd, LimitReached, Refusal
from kvbus_transfer.leases import LeaseBook


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def book(slots: int = 4) -> tuple[LeaseBook, list[int], Clock]:
    table, clock = [0] * slots, Clock()
    return LeaseBook(table, clock), table, clock


def test_the_table_shows_a_lease_while_it_runs() -> None:
    leases, table, _ = book()
    lease = leases.add(1.0, "peer")
    assert table[lease.slot] == lease.lease_id
    assert leases.end(lease.lease_id, LeaseEnd.RELEASED) is lease
    assert leases.end(lease.lease_id, LeaseEnd.RELEASED) is None
    assert table == [0] * 4
    again = leases.add(1.0, "peer")
    assert again.slot == lease.slot
    assert again.lease_id != lease.lease_id


def test_no_more_leases_than_the_table_has_entries() -> None:
    leases, _, _ = book(2)
    first = leases.add(1.0, "")
    leases.add(1.0, "")
    with pytest.raises(LimitReached) as reached:
        leases.add(1.0, "")
    assert reached.value.own
    leases.end(first.lease_id, LeaseEnd.FINISHED)
    leases.add(1.0, "")


def test_a_lease_is_over_on_time_even_if_nobody_expired_it() -> None:
    leases, _, clock = book()
    lease = leases.add(1.0, "")
    clock.now += 1.0
    with pytest.raises(GrantRefused) as refused:
        leases.get(lease.lease_id)
    assert refused.value.reason is Refusal.EXPIRED
    assert leases.expire() == [lease]


def test_an_extended_lease_runs_longer_and_never_shorter() -> None:
    leases, _, clock = book()
    lease = leases.add(1.0, "")
    leases.extend(lease.lease_id, 5.0)
    leases.extend(lease.lease_id, 2.0)
    clock.now += 4.9
    assert leases.expire() == []
    clock.now += 0.2
    assert leases.expire() == [lease]


@pytest.mark.parametrize(
    ("how", "reason"), [(LeaseEnd.EXPIRED, Refusal.EXPIRED), (LeaseEnd.RELEASED, Refusal.RELEASED)]
)
def test_who_comes_late_is_told_why(how: LeaseEnd, reason: Refusal) -> None:
    leases, _, _ = book()
    lease = leases.add(1.0, "")
    leases.end(lease.lease_id, how)
    for lease_id, wanted in ((lease.lease_id, reason), (77, Refusal.STALE)):
        with pytest.raises(GrantRefused) as refused:
            leases.get(lease_id)
        assert refused.value.reason is wanted


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book, _, self.clock = book(6)
        self.model: dict[int, float] = {}

    @rule(lease_s=st.floats(0.1, 10))
    def add(self, lease_s: float) -> None:
        if len(self.model) == 6:
            with pytest.raises(LimitReached):
                self.book.add(lease_s, "")
        else:
            lease = self.book.add(lease_s, "")
            self.model[lease.lease_id] = self.clock.now + lease_s

    @precondition(lambda self: self.model)
    @rule(data=st.data(), lease_s=st.floats(0.1, 10))
    def extend(self, data: Any, lease_s: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[lease_id] <= self.clock.now:
            with pytest.raises(GrantRefused):
                self.book.extend(lease_id, lease_s)
        else:
            self.book.extend(lease_id, lease_s)
            self.model[lease_id] = max(self.model[lease_id], self.clock.now + lease_s)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model)))
        assert self.book.end(lease_id, LeaseEnd.RELEASED) is not None
        del self.model[lease_id]

    @rule(seconds=st.floats(0, 5))
    def expire(self, seconds: float) -> None:
        self.clock.now += seconds
        over = {lease.lease_id for lease in self.book.expire()}
        assert over == {lease_id for lease_id, until in self.model.items() if until <= self.clock.now}
        self.model = {lease_id: until for lease_id, until in self.model.items() if lease_id not in over}

    @invariant()
    def holds(self) -> None:
        self.book.check_integrity()
        assert {lease.lease_id for lease in self.book.all()} == set(self.model)
        assert (self.book.next_expiry() is None) <= (not self.model)


LeaseMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestLeases = LeaseMachine.TestCase
