from kvbus_kvbm.core.breaker import Breaker


def make() -> Breaker:
    return Breaker(failures=3, rest_s=10.0, trial_s=5.0, longest_rest_s=30.0)


def opened() -> Breaker:
    breaker = make()
    breaker.failed(0.0, at_once=True)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = make()
    for _ in range(4):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.passes(0.0)
        breaker.succeeded()
    for _ in range(3):
        breaker.failed(0.0)
    assert not breaker.is_closed
    assert not breaker.passes(9.9)


def test_each_opening_counts_once() -> None:
    breaker = opened()
    assert breaker.opened == 1
    assert breaker.passes(10.0)
    breaker.failed(10.0)
    assert breaker.opened == 2
    breaker.failed(11.0)
    assert breaker.opened == 2, "it was open"


def test_then_one_trial_at_a_time_passes_and_closes_it_when_it_works() -> None:
    breaker = opened()
    assert breaker.can_pass(10.0)
    assert breaker.passes(10.0)
    assert not breaker.passes(11.0)
    breaker.succeeded()
    assert breaker.is_closed
    assert breaker.passes(11.0)


def test_each_trial_that_fails_doubles_the_rest_up_to_the_longest() -> None:
    breaker = opened()
    now_s = 10.0
    for rest_s in (20.0, 30.0, 30.0):
        assert breaker.passes(now_s)
        breaker.failed(now_s)
        assert not breaker.passes(now_s + rest_s - 0.1)
        now_s += rest_s
    assert breaker.passes(now_s)
    breaker.succeeded()
    breaker.failed(now_s, at_once=True)
    assert breaker.passes(now_s + 10.0)


def test_a_trial_of_which_nobody_reports_makes_room_for_the_next() -> None:
    breaker = opened()
    assert breaker.passes(10.0)
    assert not breaker.passes(14.9)
    assert breaker.passes(15.0)


def test_what_began_before_the_trouble_and_ends_well_proves_nothing() -> None:
    breaker = opened()
    breaker.succeeded()
    assert not breaker.is_closed
    breaker.failed(1.0)
    assert breaker.passes(10.0), "late failures do not prolong the rest"
