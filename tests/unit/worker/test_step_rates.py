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
