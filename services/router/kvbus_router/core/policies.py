"""How a worker is chosen among those that may take a request."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from kvbus_router.core.cost import Estimate

TIE = 1e-6
"""Costs that differ by less than this part count as equal, and chance decides: else one of many idle workers got everything."""


class RoutingPolicy(Protocol):
    """Third parties add one under the entry point group ``kvbus.routing_policies``: a callable without arguments that makes it."""

    @property
    def name(self) -> str:
        """What a placement says about how it was made."""

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        """One of ``estimates``: never empty, only workers that may take the request and have room, in a stable order."""


class KvPolicy:
    """The least cost: cache, load and measured rates in seconds."""

    name = "kv"

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        least = min(estimate.cost for estimate in estimates)
        best = [estimate for estimate in estimates if estimate.cost <= least * (1 + TIE)]
        return best[0] if len(best) == 1 else rng.choice(best)


class RoundRobinPolicy:
    """One after the other, by worker id; a worker that may not take a request is skipped."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        ordered = sorted(estimates, key=lambda estimate: estimate.worker_id)
        chosen = next((e for e in ordered if e.worker_id > self._last), ordered[0])
        self._last = chosen.worker_id
        return chosen


class RandomPolicy:
    name = "random"

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        return rng.choice(estimates)


class LeastLoadedPolicy:
    """The fewest requests."""

    name = "least-loaded"

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        least = min(estimate.active for estimate in estimates)
        return rng.choice([estimate for estimate in estimates if estimate.active == least])


class PowerOfTwoPolicy:
    """The less loaded of two taken at random."""

    name = "power-of-two"

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        if len(estimates) == 1:
            return estimates[0]
        one, other = rng.sample(estimates, 2)
        return one if one.active <= other.active else other


BUILT_IN: dict[str, Callable[[], RoutingPolicy]] = {
    policy.name: policy for policy in (KvPolicy, RoundRobinPolicy, RandomPolicy, LeastLoadedPolicy, PowerOfTwoPolicy)
}
