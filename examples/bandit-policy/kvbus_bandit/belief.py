"""What is believed of one worker: the factor between its observed and its predicted time to the first token.

The logarithm of the factor is taken as normal around an unknown mean, with a normal prior on that mean:

    precision of the mean = 1 / PRIOR_SPREAD^2 + evidence / NOISE_SPREAD^2      (evidence: observations, fading with each later one)
    mean                  = (sum of logarithms / NOISE_SPREAD^2) / precision

So before anything is known the factor is about 1 (the prediction is believed), and what was seen long ago fades: a worker that was
slow once is tried again.
"""

from math import exp, log, sqrt
from random import Random

import msgspec

PRIOR_SPREAD = 0.5
"""Before any observation: two thirds of all workers are within a factor of e^0.5 = 1.6 of their prediction."""
NOISE_SPREAD = 0.7
"""Spread of single observations of one worker."""
FLOOR_S = 0.05
"""Added to both times: what bus, frontend and scheduler take. Without it a prompt that is all cached, predicted at a millisecond,
would say that its worker is fifty times too slow."""


class Belief(msgspec.Struct):
    """Sums over observations, each of which counts ``memory`` times as much as the one after it."""

    evidence: float = 0.0
    logs: float = 0.0

    def observe(self, predicted_s: float, observed_s: float, memory: float) -> None:
        ratio = log((max(observed_s, 0.0) + FLOOR_S) / (max(predicted_s, 0.0) + FLOOR_S))
        self.evidence = self.evidence * memory + 1.0
        self.logs = self.logs * memory + ratio

    def fade(self, memory: float) -> None:
        """Time has passed for others, but nothing was heard of this one."""
        self.evidence *= memory
        self.logs *= memory

    @property
    def mean(self) -> float:
        return self.logs / NOISE_SPREAD**2 / self._precision

    @property
    def spread(self) -> float:
        return 1 / sqrt(self._precision)

    @property
    def _precision(self) -> float:
        return 1 / PRIOR_SPREAD**2 + self.evidence / NOISE_SPREAD**2

    def sample(self, rng: Random) -> float:
        """A factor, drawn from what is believed."""
        return exp(rng.gauss(self.mean, self.spread))
