import pytest

from kvbus_worker.core.onboard_rates import OnboardRates


def test_what_was_never_fetched_has_no_rate() -> None:
    rates = OnboardRates()
    rates.observe("g2", 0, 1.0)
    rates.observe("g2", 5, 0.0)
    assert rates.tokens_per_s == {}


def test_each_source_has_its_own_rate() -> None:
    rates = OnboardRates()
    rates.observe("g2", 1000, 0.01)
    rates.observe("g4", 1000, 0.5)
    assert rates.tokens_per_s == {"g2": 100_000, "g4": 2000}


def test_a_short_fetch_says_less_than_a_long_one() -> None:
    rates = OnboardRates()
    rates.observe("g2", 100_000, 1.0)
    rates.observe("g2", 16, 0.005)
    assert rates.tokens_per_s["g2"] == pytest.approx(100_000, rel=0.01)


def test_a_change_is_noticed_after_some_fetches() -> None:
    rates = OnboardRates()
    rates.observe("g2", 1000, 0.01)
    for _ in range(40):
        rates.observe("g2", 1000, 0.1)
    assert rates.tokens_per_s["g2"] == pytest.approx(10_000, rel=0.05)
