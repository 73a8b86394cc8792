import hypothesis.strategies as st
from hypothesis import given

from kvbus_worker.engines.ranking import LONGEST_LEAD_S, MAX_PRIORITY, MAX_STRICT_PRIORITY, Rank, rank

any_hint = st.integers(-(2**31), 2**31 - 1)


def test_strict_priority_then_priority_then_arrival_decide_among_those_that_came_together() -> None:
    ranks = {
        "first": rank(0, 0, 1, 0.0),
        "second": rank(0, 0, 2, 0.0),
        "urgent": rank(5, 0, 3, 0.0),
        "strict": rank(0, 1, 4, 0.0),
    }
    assert sorted(ranks, key=ranks.__getitem__) == ["strict", "urgent", "first", "second"]


def test_waiting_makes_up_for_priority_and_then_nothing_may_be_taken_away() -> None:
    patient, soon, late = rank(0, 0, 1, 0.0), rank(1, 0, 2, 9.0), rank(1, 0, 3, 11.0)
    assert sorted([late, soon, patient]) == [soon, patient, late]
    assert soon.outranks(patient)
    assert not late.outranks(patient)
    assert not patient.outranks(late)


def test_equal_urgency_takes_nothing_from_what_came_later() -> None:
    assert not rank(3, 0, 1, 0.0).outranks(rank(3, 0, 2, 5.0))


@given(any_hint, any_hint, any_hint, any_hint, st.floats(0, 1e6))
def test_nothing_is_overtaken_by_what_came_longer_after_it_than_the_longest_lead(
    priority: int, strict: int, other_priority: int, other_strict: int, arrived: float
) -> None:
    early: Rank = rank(priority, strict, 1, arrived)
    late = rank(other_priority, other_strict, 2, arrived + LONGEST_LEAD_S + 1.0)
    assert early < late
    assert not late.outranks(early)


def test_hints_beyond_the_limits_count_as_the_limits() -> None:
    assert rank(MAX_PRIORITY + 1, MAX_STRICT_PRIORITY + 1, 1, 0.0) == rank(MAX_PRIORITY, MAX_STRICT_PRIORITY, 1, 0.0)
    assert rank(-MAX_PRIORITY - 1, -1, 1, 0.0) == rank(-MAX_PRIORITY, 0, 1, 0.0)
