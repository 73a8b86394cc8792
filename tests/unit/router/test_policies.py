from collections import Counter
from random import Random

import msgspec
import pytest

from kvbus_router.core.estimate import Bias, Estimate
from kvbus_router.core.policies import KvPolicy


def costing(worker_id: str, cost_s: float) -> Estimate:
    """An estimate of this cost; below 0 by affinity."""
    return Estimate(
        worker_id=worker_id,
        incarnation=1,
        cached_tokens=0,
        inflight_tokens=0,
        onboard=(),
        uncached_tokens=0,
        waiting_tokens=0,
        active=0,
        running=0,
        prefill_tokens_per_s=1.0,
        decode_step_s=0.0,
        wait_s=max(cost_s, 0.0),
        prefill_s=0.0,
        work_s=0.0,
        decode_s=0.0,
        bias=Bias(affinity_s=max(-cost_s, 0.0)),
    )


def shares(policy: KvPolicy, *costs_s: float, draws: int = 4000) -> list[float]:
    rng = Random(3)
    estimates = [costing(f"w{i}", cost_s) for i, cost_s in enumerate(costs_s)]
    chosen = Counter(policy.choose(estimates, rng).worker_id for _ in range(draws))
    return [chosen[estimate.worker_id] / draws for estimate in estimates]


def test_at_temperature_zero_the_best_one_gets_everything() -> None:
    assert shares(KvPolicy(), 0.2, 0.1, 0.1001) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("cost_s", [0.0, 0.25, -0.1])
def test_equal_costs_share_fairly_whatever_their_sign(cost_s: float) -> None:
    assert shares(KvPolicy(), cost_s, cost_s, cost_s + 1.0, cost_s) == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=0.03)


def test_a_temperature_is_a_softmax_over_seconds() -> None:
    e = 2.718281828
    total = 1 + 1 / e + 1 / e**2
    expected = [1 / e / total, 1 / total, 1 / e**2 / total]
    assert shares(KvPolicy(temperature_s=0.1), 0.3, 0.2, 0.4) == pytest.approx(expected, abs=0.03)


def test_a_temperature_does_not_overflow_on_costs_far_apart() -> None:
    assert shares(KvPolicy(temperature_s=1e-9), 1e6, 0.0) == [0.0, 1.0]


def test_the_cost_of_an_estimate_is_what_policies_see() -> None:
    assert costing("w", -0.5).cost_s == -0.5
    assert msgspec.structs.replace(costing("w", 0.5), work_s=0.25).cost_s == 0.75
