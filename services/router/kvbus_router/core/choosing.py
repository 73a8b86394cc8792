"""One choice: who may take the request, who has room, what it would cost each, and whom the policy takes."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

import msgspec

from kvbus_router.core.affinity import Mode, SessionAffinity, session_key
from kvbus_router.core.cost import estimate
from kvbus_router.core.eligibility import Sorted, Verdict, sort_workers, why_no_room
from kvbus_router.core.estimate import Bias, Estimate
from kvbus_router.core.explaining import Rejected
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy, LearningPolicy, Outcome, RoutingPolicy
from kvbus_router.core.sources import Holders
from kvbus_router.core.state import RouterState
from kvbus_router.core.workers import Worker
from kvbus_wire.indexer import Match
from kvbus_wire.router import RouteRequest

MOST_LENGTH = 8.0
"""How much longer, or shorter, than usual a request can count."""


class Weighed(msgspec.Struct, frozen=True):
    """``estimates``: of the workers that may take the request and have room; ``rejected``: the others. ``full``: of those that have
    no room and compute a part of its prompt. ``session_worker_id``: who served the session last."""

    estimates: list[Estimate]
    full: list[Estimate]
    rejected: list[Rejected]
    session_worker_id: str


class Chooser:
    """``thresholds`` may be changed at any time; they count from the next choice on."""

    def __init__(
        self, state: RouterState, limits: Limits, weights: Weights, policy: RoutingPolicy, rng: Random
    ) -> None:
        self.thresholds = limits.thresholds
        self.affinity = SessionAffinity(Mode(limits.affinity), limits.max_sessions, limits.affinity_ttl_s)
        self._state = state
        self._bonus_s = limits.affinity_bonus_s
        self._weights = weights
        self._policy = policy
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._rng = rng
        # Who takes no notice of costs would not have come for the prefix.
        self._by_cost = isinstance(policy, KvPolicy)

    @property
    def policy(self) -> str:
        return self._policy.name

    def sort(self, request: RouteRequest) -> Sorted:
        """Who may take the request, whether there is room or not."""
        return sort_workers(self._state.workers(request.model), request, self.thresholds)

    def has_room(self, worker: Worker) -> bool:
        return why_no_room(worker, self.thresholds) is None

    def weigh(
        self,
        request: RouteRequest,
        matches: Sequence[Match],
        inflight: Mapping[str, int],
        workers: Sorted,
        now: float,
    ) -> Weighed:
        """``inflight``: blocks of the prompt by the worker that computes them."""
        bound = self._session_worker(request, now)
        rejected = [(worker.worker_id, verdict) for worker, verdict in workers.rejected]
        exactly = self.affinity.mode is Mode.HARD and any(worker.worker_id == bound for worker in workers.eligible)
        room, full = [], []
        for worker in workers.eligible:
            elsewhere = Verdict.SESSION_ELSEWHERE if exactly and worker.worker_id != bound else None
            verdict = elsewhere or why_no_room(worker, self.thresholds)
            if verdict is None:
                room.append(worker)
            else:
                rejected.append((worker.worker_id, verdict))
                if elsewhere is None and inflight.get(worker.worker_id):
                    full.append(worker)
        if not room:
            return Weighed([], [], rejected, bound)
        holders = Holders(matches, inflight, self._state.kvbms, self._weights)
        estimates = self._estimates(request, holders, room, bound)
        return Weighed(
            estimates, self._estimates(request, holders, full if self._by_cost else [], bound), rejected, bound
        )

    def choose(self, estimates: Sequence[Estimate]) -> Estimate:
        return self._policy.choose(estimates, self._rng)

    def observe(self, outcome: Outcome) -> None:
        if self._learner is not None:
            self._learner.observe(outcome)

    def _session_worker(self, request: RouteRequest, now: float) -> str:
        if request.session is None:
            return ""
        return self.affinity.worker_of(session_key(request.model, request.tenant, request.session.id), now) or ""

    def _estimates(
        self, request: RouteRequest, holders: Holders, workers: Iterable[Worker], bound: str
    ) -> list[Estimate]:
        tokens, weights, usual = request.prompt_tokens, self._weights, self._bias_of_hints(request)
        return [
            estimate(worker, tokens, holders.cached(worker), weights, self._bias(usual, request, worker, bound))
            for worker in workers
        ]

    def _bias(self, usual: Bias, request: RouteRequest, worker: Worker, bound: str) -> Bias:
        """``usual``: that of workers that the request neither prefers nor avoids."""
        last = worker.worker_id == bound and self.affinity.mode is Mode.SOFT
        tainted = request.preferred_taints and worker.worker.taints
        if not last and not tainted:
            return usual
        factor = 1.0
        for taint in worker.worker.taints if tainted else ():
            factor *= request.preferred_taints.get(taint, 1.0)
        return Bias(factor, self._bonus_s if last else 0.0, usual.others, usual.length)

    def _bias_of_hints(self, request: RouteRequest) -> Bias:
        """See `cost`: others, length."""
        hints, usual = request.hints, self._weights.expected_output_tokens
        expected = min(hints.osl or usual, request.max_tokens)
        length = min(max(expected / usual, 1 / MOST_LENGTH), MOST_LENGTH)
        return Bias(others=1 / (1 + max(hints.latency_sensitivity or 0.0, 0.0)), length=length)
