"""Thompson sampling over the router's own predictions."""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from kvbus_bandit.belief import Belief
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.policies import Outcome

MAX_WORKERS = 4096
MEMORY = 0.97
"""Of one observation after the next one of that worker: about the last 30 count."""
IDLE_MEMORY = 0.999
"""Of what is believed of a worker after each choice that went to another."""


class BanditPolicy:
    """For each worker a factor is drawn from what is believed of it; the least predicted time, times that factor, wins.

    A worker of which little is known is drawn far apart, so it is tried now and then; one that has kept or broken its promises
    often is judged by that. Beliefs are those of this router: replicas learn each for themselves, from their own choices.
    """

    name = "bandit"

    def __init__(
        self, *, max_workers: int = MAX_WORKERS, memory: float = MEMORY, idle_memory: float = IDLE_MEMORY
    ) -> None:
        self._max_workers = max_workers
        self._memory = memory
        self._idle_memory = idle_memory
        self._beliefs: OrderedDict[str, Belief] = OrderedDict()

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        chosen = min(estimates, key=lambda estimate: self._drawn_cost_s(estimate, rng))
        for estimate in estimates:
            belief = self._beliefs.get(_key(estimate))
            if belief is not None and estimate is not chosen:
                belief.fade(self._idle_memory)
        return chosen

    def observe(self, outcome: Outcome) -> None:
        key = _key(outcome.chosen)
        belief = self._beliefs.setdefault(key, Belief())
        self._beliefs.move_to_end(key)
        belief.observe(outcome.chosen.ttft_s, outcome.ttft_s, self._memory)
        if len(self._beliefs) > self._max_workers:
            self._beliefs.popitem(last=False)

    def believed(self, estimate: Estimate) -> Belief:
        """Of the worker of this estimate, in this incarnation."""
        return self._beliefs.get(_key(estimate), Belief())

    def __len__(self) -> int:
        return len(self._beliefs)

    def _drawn_cost_s(self, estimate: Estimate, rng: Random) -> float:
        """What the request does to others, taints and affinity count as they do for the policy ``kv``."""
        return estimate.cost_s + estimate.ttft_s * (self.believed(estimate).sample(rng) - 1.0)


def _key(estimate: Estimate) -> str:
    """A worker that has restarted may be another machine."""
    return f"{estimate.worker_id}/{estimate.incarnation}"
