"""What a request would take on a worker: plain numbers, from which policies choose. `cost` says how they come about."""

import msgspec


class Onboarding(msgspec.Struct, frozen=True):
    """What would be fetched from one source."""

    source: str
    tokens: int
    seconds: float


class Bias(msgspec.Struct, frozen=True):
    """What besides time counts: of a worker, a factor on its cost, and a bonus that is taken off; of the request, how much what it
    does to others counts (``others``), and how long it will run, against one of whom nothing is known (``length``)."""

    taint_factor: float = 1.0
    affinity_s: float = 0.0
    others: float = 1.0
    length: float = 1.0


NO_BIAS = Bias()


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and seconds of one request on one worker.

    ``cached_tokens``: in G1; ``inflight_tokens``: beyond those, computed there right now; ``uncached_tokens`` have to be computed
    for the request. ``active``: requests there; ``running``: of these, those that take part in its steps.
    """

    worker_id: str
    incarnation: int
    cached_tokens: int
    inflight_tokens: int
    onboard: tuple[Onboarding, ...]
    uncached_tokens: int
    waiting_tokens: int
    active: int
    running: int
    prefill_tokens_per_s: float
    decode_step_s: float
    wait_s: float
    prefill_s: float
    work_s: float
    decode_s: float
    bias: Bias = NO_BIAS

    @property
    def onboard_tokens(self) -> int:
        return sum([part.tokens for part in self.onboard]) if self.onboard else 0

    @property
    def onboard_s(self) -> float:
        return sum([part.seconds for part in self.onboard]) if self.onboard else 0.0

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.onboard_s + self.prefill_s

    @property
    def cost_s(self) -> float:
        return (self.ttft_s + self.work_s + self.decode_s) * self.bias.taint_factor - self.bias.affinity_s
