import math

import pytest

from kvbus_wire.request import Stopping
from kvbus_worker.engines.mock.speech import one_by_one, played
from kvbus_worker.engines.mock.timing import StepWork, TimingModel


def test_a_step_costs_what_the_documented_formula_says() -> None:
    model = TimingModel(
        step_base_s=0.01,
        prefill_tokens_per_s=1000.0,
        attention_s_per_pair=1e-6,
        decode_s_per_seq=0.001,
        decode_s_per_context_token=1e-5,
        speedup=2.0,
    )
    work = StepWork()
    work.add_prefill(10, 100)
    work.add_decode(50)
    work.add_decode(70)
    expected = 0.01 + 10 / 1000 + 1e-6 * (10 * 100 + 55) + 2 * 0.001 + 1e-5 * 120
    assert model.step_s(work) == pytest.approx(expected / 2)
    assert model.step_s(StepWork()) == 0.0


def test_an_infinite_speedup_makes_every_step_free() -> None:
    model = TimingModel(speedup=math.inf)
    assert model.free
    assert model.step_s(StepWork(prefill_tokens=100)) == 0.0
    assert model.prior_prefill_tokens_per_s(100) > 0


@pytest.mark.parametrize(
    "bad", [{"speedup": 0}, {"prefill_tokens_per_s": -1.0}, {"step_base_s": math.inf}, {"step_base_s": -1}]
)
def test_impossible_timing_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"timing model|above 0"):
        TimingModel(**bad)


def test_chunks_come_in_one_step_each_and_eos_ends_them() -> None:
    speech = played([[1, 2], [3], [4, 5, 6]], "stop", Stopping(max_tokens=100), eos=9)
    assert speech.tokens == [1, 2, 3, 4, 5, 6]
    assert speech.ends == [2, 2, 3, 6, 6, 6]
    assert (speech.reason, speech.stop_token_id) == ("stop", 9)


def test_finish_decides_how_played_output_ends() -> None:
    stopping = Stopping(max_tokens=100)
    assert played([[1]], "length", stopping, eos=9).reason == "length"
    ended = played([[1]], "stop_sequence", stopping, eos=9)
    assert (ended.reason, ended.stop_token_id) == ("stop", None)


def test_max_tokens_cuts_played_output_inside_a_chunk() -> None:
    speech = played([[1, 2], [3, 4]], "stop", Stopping(max_tokens=3), eos=9)
    assert (speech.tokens, speech.ends, speech.reason, speech.stop_token_id) == ([1, 2, 3], [2, 2, 3], "length", None)


def test_a_stop_token_ends_the_output_but_not_before_min_tokens() -> None:
    speech = one_by_one(
        [7, 1, 7, 2], Stopping(max_tokens=10, stop_token_ids=(7,), min_tokens=1), reason="length", eos=9
    )
    assert (speech.tokens, speech.reason, speech.stop_token_id) == ([7, 1], "stop", 7)


def test_output_that_fills_max_tokens_exactly_ends_by_length() -> None:
    assert one_by_one([1, 2], Stopping(max_tokens=2), reason="stop", eos=9).reason == "length"
