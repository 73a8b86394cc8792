"""The example policy: what it believes, whom it chooses, and that the router finds it."""

import sys
import tomllib
from collections import Counter
from math import exp, log
from pathlib import Path
from random import Random

import pytest

from kvbus_bandit import BanditPolicy
from kvbus_bandit.belief import FLOOR_S, NOISE_SPREAD, PRIOR_SPREAD, Belief
from kvbus_router.adapters.policies import make_policy
from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy, LearningPolicy, Outcome, RoutingPolicy
from kvbus_testkit.routing import request, worker_record

PROJECT = Path(__file__).resolve().parents[1]
ENTRY_POINT = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"][
    "kvbus.routing_policies"
]


def estimate(worker_id: str, ttft_s: float, *, incarnation: int = 1) -> Estimate:
    return Estimate(
        worker_id=worker_id,
        incarnation=incarnation,
        cached_tokens=0,
        inflight_tokens=0,
        onboard=(),
        uncached_tokens=0,
        waiting_tokens=0,
        active=0,
        running=0,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.0,
        wait_s=0.0,
        prefill_s=ttft_s,
        work_s=0.0,
        decode_s=0.0,
    )


class Cluster:
    """Workers that all say 1,000 tokens/s, through a real dispatcher. ``slowness``: how often longer each really takes."""

    def __init__(self, policy: RoutingPolicy, slowness: dict[str, float]) -> None:
        self.dispatcher = Dispatcher("router", Limits(), Weights(), policy, Random(5))
        self.slowness = slowness
        self.now = 0.0
        self.noise = Random(6)
        for worker_id in slowness:
            self.dispatcher.state.joined(worker_record(worker_id))

    def run(self, requests: int) -> tuple[Counter[str], float]:
        """One after the other. Where they went, and their mean time to the first token."""
        went, total_s = Counter[str](), 0.0
        for _ in range(requests):
            outcome, _settled = self.dispatcher.submit(request("r", prompt_tokens=1000), (), 1e9, self.now)
            assert isinstance(outcome, Placed)
            took_s = outcome.chosen.ttft_s * self.slowness[outcome.placement.worker_id] * exp(self.noise.gauss(0, 0.2))
            self.now += took_s
            self.dispatcher.first_token("r", self.now)
            self.dispatcher.finished("r")
            went[outcome.placement.worker_id] += 1
            total_s += took_s
        return went, total_s / requests


def test_an_unknown_worker_is_believed() -> None:
    belief = Belief()
    assert (belief.mean, belief.spread) == (0.0, PRIOR_SPREAD)


def test_the_belief_follows_its_formula() -> None:
    belief = Belief()
    belief.observe(1.0, 2.0, 0.5)
    belief.observe(1.0, 3.0, 0.5)
    logs = 0.5 * log((2 + FLOOR_S) / (1 + FLOOR_S)) + log((3 + FLOOR_S) / (1 + FLOOR_S))
    precision = 1 / PRIOR_SPREAD**2 + 1.5 / NOISE_SPREAD**2
    assert belief.mean == pytest.approx(logs / NOISE_SPREAD**2 / precision)
    assert belief.spread == pytest.approx(precision**-0.5)


def test_a_prompt_that_is_all_cached_says_little_about_its_worker() -> None:
    belief = Belief()
    belief.observe(0.001, 0.02, 1.0)
    assert exp(belief.mean) < 1.3


@pytest.mark.parametrize(("predicted_s", "observed_s"), [(0.0, 0.0), (-1.0, -1.0), (1e9, 0.0), (0.0, 1e9)])
def test_no_observation_breaks_a_belief(predicted_s: float, observed_s: float) -> None:
    belief = Belief()
    belief.observe(predicted_s, observed_s, 0.9)
    assert belief.sample(Random(1)) > 0


def test_a_worker_that_is_slower_than_it_says_is_found_out() -> None:
    slowness = {"w1": 1.0, "w2": 1.0, "liar": 3.0}
    went, mean_s = Cluster(BanditPolicy(), slowness).run(400)
    blind, blind_s = Cluster(KvPolicy(), slowness).run(400)
    assert blind["liar"] > 100, "the numbers alone do not tell"
    assert went["liar"] < 40
    assert mean_s < 0.75 * blind_s


def test_a_worker_that_has_recovered_is_used_again() -> None:
    cluster = Cluster(BanditPolicy(), {"w1": 1.0, "w2": 3.0})
    before, _ = cluster.run(300)
    cluster.slowness["w2"] = 0.5
    cluster.run(1500)
    after, _ = cluster.run(300)
    assert before["w2"] < 60
    assert after["w2"] > 200


def test_everything_else_in_the_cost_counts_as_it_does_without_learning() -> None:
    chosen = BanditPolicy().choose([estimate("near", 0.1), estimate("far", 100.0)], Random(1))
    assert chosen.worker_id == "near"


def test_a_worker_that_has_restarted_is_another_one() -> None:
    policy = BanditPolicy()
    policy.observe(Outcome("r", estimate("w", 1.0), 9.0))
    assert policy.believed(estimate("w", 1.0)).evidence == 1.0
    assert policy.believed(estimate("w", 1.0, incarnation=2)).evidence == 0.0


def test_as_many_workers_are_remembered_as_the_limit_says_the_silent_ones_go_first() -> None:
    policy = BanditPolicy(max_workers=2)
    for worker_id in ("a", "b", "a", "c"):
        policy.observe(Outcome("r", estimate(worker_id, 1.0), 2.0))
    assert len(policy) == 2
    assert [policy.believed(estimate(worker_id, 1.0)).evidence > 0 for worker_id in "abc"] == [True, False, True]


def test_the_router_finds_it_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installation leaves it: metadata beside the package, on the path."""
    metadata = tmp_path / "kvbus_bandit_policy-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbus-bandit-policy\nVersion: 0.1.0\n")
    lines = [f"{name} = {value}" for name, value in ENTRY_POINT.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvbus.routing_policies]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = make_policy("bandit")
    assert policy.name == "bandit"
    assert isinstance(policy, LearningPolicy)
    assert "kvbus_bandit" in sys.modules
