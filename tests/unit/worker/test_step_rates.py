import pytest

from kvbus_worker.engines.step_rates import StepRates


def test_a_turn_of_a_few_new_tokens_does_not_make_the_engine_look_slow() -> None:
    rates = StepRates(20_000, decode_step_s=0.006)
    for _ in range(1000):
        rates.observe(4, 0, 0.0062)
    assert rates.prefill_tokens_per_s == pytest.approx(20_000)
    assert rates.decode_step_s == 0.006


def test_a_step_that_was_held_up_counts_by_its_tokens() -> None:
    rates = StepRates(20_000, decode_step_s=0.006)
    rates.observe(4, 0, 0.026)
    assert rates.prefill_tokens_per_s == pytest.approx(19_000, rel=0.01)


def test_the_rate_of_whole_prompts_is_learned_in_some_of_them() -> None:
    rates = StepRates(20_000, decode_step_s=0.006)
    for _ in range(16):
        rates.observe(2048, 0, 0.006 + 2048 / 5000)
    assert rates.prefill_tokens_per_s == pytest.approx(5000, rel=0.05)


def test_decode_that_shares_a_step_with_prefill_is_taken_off() -> None:
    rates = StepRates(20_000, decode_step_s=0.05)
    for _ in range(50):
        rates.observe(2000, 8, 0.15)
    assert rates.prefill_tokens_per_s == pytest.approx(20_000, rel=0.01)
    assert rates.decode_step_s == 0.05


def test_pure_decode_steps_count_as_often_as_they_were() -> None:
    one_by_one, at_once = StepRates(1, decode_step_s=0.01), StepRates(1, decode_step_s=0.01)
    for _ in range(7):
        one_by_one.observe(0, 3, 0.02)
    at_once.observe(0, 3, 0.14, steps=7)
    assert at_once.decode_step_s == pytest.approx(one_by_one.decode_step_s)
    assert at_once.prefill_tokens_per_s == 1


def test_a_step_that_took_no_time_or_had_no_work_says_nothing() -> None:
    rates = StepRates(20_000, decode_step_s=0.006)
    rates.observe(100, 0, 0.0)
    rates.observe(0, 0, 1.0)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (20_000, 0.006)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_that_was_held_up_and_is_not_asked_again_looks_fast_again() -> None:
    clock = Clock()
    rates = StepRates(1000, decode_step_s=0.006, clock=clock)
    rates.observe(8192, 0, 82)
    slow = rates.prefill_tokens_per_s
    assert slow == pytest.approx(181, rel=0.01)
    clock.now += 60
    assert rates.prefill_tokens_per_s == pytest.approx((1000 + slow) / 2)
    clock.now += 3600
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    rates.observe(8192, 0, 8192 / 100)
    assert rates.prefill_tokens_per_s == pytest.approx(181, rel=0.01), "from there on, as if nothing had been before"


def test_a_first_measurement_that_was_too_low_is_forgotten_for_the_best_one() -> None:
    clock = Clock()
    rates = StepRates(50, decode_step_s=0.006, clock=clock)
    for _ in range(100):
        rates.observe(8192, 0, 8.192)
    best = rates.prefill_tokens_per_s
    assert best == pytest.approx(1000, rel=0.01)
    rates.observe(8192, 0, 100)
    clock.now += 3600
    assert rates.prefill_tokens_per_s == pytest.approx(best)
