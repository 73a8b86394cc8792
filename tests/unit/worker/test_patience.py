from kvbus_worker.core.onboard_rates import OnboardRates
from kvbus_worker.core.patience import LowerTiers, Patience


def test_nobody_waits_longer_than_computing_takes() -> None:
    patience = Patience(deadline=100.0, prefill_tokens_per_s=1000.0)
    assert patience.wait_s(4000, now=10.0) == 4.0
    assert patience.wait_s(3000, now=12.0) == 2.0
    assert patience.wait_s(3000, now=14.5) == 0.0


def test_the_deadline_ends_all_waiting() -> None:
    assert Patience(deadline=11.0, prefill_tokens_per_s=1000.0).wait_s(4000, now=10.0) == 1.0
    assert Patience(deadline=11.0).wait_s(4000, now=12.0) == 0.0


def test_blocks_that_come_slower_than_they_are_computed_are_not_waited_for() -> None:
    patience = Patience(deadline=100.0, prefill_tokens_per_s=1000.0)
    patience.wait_s(8000, now=0.0)
    patience.came(600)
    assert patience.wait_s(7400, now=0.5) > 0
    patience.came(100)
    assert patience.wait_s(7300, now=1.0) == 0.0


def test_a_prefetch_waits_until_its_deadline_however_slow_the_tier_is() -> None:
    patience = Patience(deadline=30.0)
    patience.wait_s(8000, now=0.0)
    patience.came(16)
    assert patience.wait_s(7984, now=20.0) == 10.0


def test_nothing_missing_is_nothing_to_wait_for() -> None:
    assert Patience(deadline=30.0).wait_s(0, now=0.0) == 0.0


def test_a_slow_tier_is_left_out_and_tried_again_later() -> None:
    lower = LowerTiers(OnboardRates(), probe_s=10.0)
    assert lower.worth_asking(("g3", "g4"), 500, 1000.0, now=0.0) == ("g3", "g4")
    lower.observe("g3", 100, 1.0)
    assert lower.worth_asking(("g3", "g4"), 500, 1000.0, now=1.0) == ("g3", "g4"), "it is tried"
    assert lower.worth_asking(("g3", "g4"), 500, 1000.0, now=2.0) == ("g4",)
    assert lower.worth_asking(("g3",), 500, 1000.0, now=11.5) == ("g3",)
    assert lower.worth_asking(("g3",), 500, 50.0, now=12.0) == ("g3",), "computing is slower still"


def test_a_tier_that_let_nothing_come_in_time_is_asked_for_longer_prompts_only() -> None:
    lower = LowerTiers(OnboardRates(), probe_s=10.0)
    lower.came_too_late("g4", 0.5, now=0.0)
    assert lower.worth_asking(("g3", "g4"), 400, 1000.0, now=1.0) == ("g3",)
    assert lower.worth_asking(("g3", "g4"), 600, 1000.0, now=1.0) == ("g3", "g4")
    assert lower.worth_asking(("g4",), 400, 1000.0, now=10.0) == ("g4",)
    assert lower.worth_asking(("g4",), 400, 1000.0, now=11.0) == ()
    lower.observe("g4", 4000, 1.0)
    assert lower.worth_asking(("g4",), 400, 1000.0, now=12.0) == ("g4",), "it has come since"


def test_a_prefetch_asks_however_slow_a_tier_is() -> None:
    lower = LowerTiers(OnboardRates(), probe_s=10.0)
    lower.observe("g3", 1, 1.0)
    lower.came_too_late("g4", 60.0, now=0.0)
    assert lower.worth_asking(("g3", "g4"), 400, 0.0, now=1.0) == ("g3", "g4")
