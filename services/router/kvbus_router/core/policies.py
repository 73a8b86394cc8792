"""How a worker is chosen among those that may take a request and have room."""

from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from kvbus_router.core.estimate import Estimate

TIE = 1e-6
"""Costs that differ by less than this part count as equal, and chance decides: else one of many idle workers got everything."""


class RoutingPolicy(Protocol):
    """Third parties add one under the entry point group ``kvbus.routing_policies``: a callable without arguments that makes it."""

    @property
    def name(self) -> str:
        """What a placement says about how it was made."""

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        """One of ``estimates``: never empty, only workers that may take the request and have room, in a stable order.

        If it raises, or returns anything else, a router takes the choice of `KvPolicy`."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a choice. ``ttft_s``: from the placement to the moment when the router heard of the first token; it compares
    with ``chosen.ttft_s``, the prediction at the time of the placement."""

    request_id: str
    chosen: Estimate
    ttft_s: float


@runtime_checkable
class LearningPolicy(RoutingPolicy, Protocol):
    """A policy that is told how its choices went."""

    def observe(self, outcome: Outcome) -> None:
        """A request that this policy placed has its first token. Requests that never had one are not reported: nobody can tell a
        slow worker from a client that went away. Called in the order of the first tokens, not of the choices."""


class PolicyFailed(Exception):
    """``kind``: ``choose`` or ``observe`` when that raised (see the cause), ``not_eligible`` when the choice is none of the workers
    that there were."""

    def __init__(self, policy: str, kind: str, reason: str) -> None:
        super().__init__(f"policy {policy}: {kind}: {reason}")
        self.policy = policy
        self.kind = kind
        self.reason = reason


OnPolicyFailed = Callable[[PolicyFailed], None]


def let_fail(failure: PolicyFailed) -> None:
    """For simulations and tests, which are to say what the policy does and not what `KvPolicy` does in its place."""
    raise failure


class KvPolicy:
    """The least cost: cache, load and measured rates in seconds.

    ``temperature_s`` above 0: a worker that costs so many seconds more than the best one is chosen e times less often
    (a softmax over ``-cost / temperature``). At 0 the best one gets it, and chance decides between equals.
    """

    name = "kv"

    def __init__(self, temperature_s: float = 0.0) -> None:
        self._temperature_s = temperature_s

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        costs_s = [estimate.cost_s for estimate in estimates]
        least_s = min(costs_s)
        if self._temperature_s > 0:
            odds = [exp((least_s - cost_s) / self._temperature_s) for cost_s in costs_s]
            return rng.choices(estimates, odds)[0]
        # A bonus can make a cost negative, so the margin is a part of its size.
        limit_s = least_s + abs(least_s) * TIE
        best = [estimate for estimate, cost_s in zip(estimates, costs_s, strict=True) if cost_s <= limit_s]
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
