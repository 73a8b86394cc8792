"""One choice: who may take the request, who has room, what it would cost each, and whom the policy takes."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from random import Random

import msgspec

from kvbus_router.core.affinity import Mode, SessionAffinity, session_key
from kvbus_router.core.candidates import drawn
from kvbus_router.core.cost import estimate
from kvbus_router.core.eligibility import Verdict, why_no_room, why_not
from kvbus_router.core.estimate import Bias, Estimate
from kvbus_router.core.explaining import Rejected
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.policies import (
    KvPolicy,
    LearningPolicy,
    OnPolicyFailed,
    Outcome,
    PolicyFailed,
    RoutingPolicy,
    let_fail,
)
from kvbus_router.core.roster import Roster
from kvbus_router.core.sources import Holders
from kvbus_router.core.state import RouterState
from kvbus_router.core.workers import Worker
from kvbus_wire.indexer import Match
from kvbus_wire.router import RouteRequest

LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
"""Of a preferred or avoided taint, and of all those of a worker together."""
MOST_LENGTH = 8.0
"""How much longer, or shorter, than usual a request can count."""


class Weighed(msgspec.Struct, frozen=True):
    """``estimates``: of the workers that may take the request and have room; ``rejected``: the others. ``full``: of those that have
    no room and compute a part of its prompt. ``session_worker_id``: who served the session last; ``only``: the same, where the
    request goes to no other. ``unseen``: so many workers were not looked at."""

    estimates: list[Estimate]
    full: list[Estimate]
    rejected: list[Rejected]
    session_worker_id: str
    only: str
    unseen: int
    holders: Holders


class _Looked:
    """Workers that were looked at for a request. ``only``: of those that may take it, the one it goes to (empty: any)."""

    def __init__(self, request: RouteRequest, inflight: Mapping[str, int], thresholds: Thresholds, only: str) -> None:
        self._request = request
        self._inflight = inflight
        self._thresholds = thresholds
        self._only = only
        self.room: list[Worker] = []
        self.full: list[Worker] = []
        self.rejected: list[Rejected] = []

    @property
    def count(self) -> int:
        return len(self.room) + len(self.rejected)

    def at(self, worker: Worker) -> bool:
        """Whether it may take the request and has room."""
        verdict = why_not(worker, self._request, self._thresholds)
        if verdict is None and self._only and worker.worker_id != self._only:
            verdict = Verdict.SESSION_ELSEWHERE
        no_room = why_no_room(worker, self._thresholds) if verdict is None else verdict
        if no_room is None:
            self.room.append(worker)
            return True
        self.rejected.append((worker.worker_id, no_room))
        if verdict is None and self._inflight.get(worker.worker_id):
            self.full.append(worker)
        return False


class Chooser:
    """``thresholds`` and ``routers``, the number of replicas including this one, may be changed at any time; they count from the
    next choice on. ``policy``: the name of what chooses. ``policy_failed`` is told when it cannot, and may raise; else `KvPolicy`
    chooses in its place."""

    def __init__(
        self,
        state: RouterState,
        limits: Limits,
        weights: Weights,
        policy: RoutingPolicy,
        rng: Random,
        policy_failed: OnPolicyFailed = let_fail,
    ) -> None:
        self.policy = policy.name
        self.thresholds = limits.thresholds
        self.affinity = SessionAffinity(Mode(limits.affinity), limits.max_sessions, limits.affinity_ttl_s)
        self.routers = 1
        self._limits = limits
        self._state = state
        self._weights = weights
        self._policy = policy
        self._policy_failed = policy_failed
        self._stand_in = KvPolicy()
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._rng = rng
        # Who takes no notice of costs would not have come for the prefix.
        self._by_cost = isinstance(policy, KvPolicy)

    def may_run(self, request: RouteRequest) -> bool:
        """Whether there is a worker that may take the request, with room or without."""
        return any(why_not(worker, request, self.thresholds) is None for worker in self._those_for(request))

    def may_take(self, worker_id: str, request: RouteRequest) -> bool:
        worker = self._state.worker(worker_id)
        return worker is not None and why_not(worker, request, self.thresholds) is None

    def has_room_at(self, worker_id: str) -> bool:
        worker = self._state.worker(worker_id)
        return worker is not None and self.has_room(worker)

    def has_room(self, worker: Worker) -> bool:
        return why_no_room(worker, self.thresholds) is None

    def has_room_for(self, request: RouteRequest) -> bool:
        """Whether a worker that may take the request has room."""
        return any(
            self.has_room(worker) and why_not(worker, request, self.thresholds) is None
            for worker in self._those_for(request)
        )

    def _those_for(self, request: RouteRequest) -> Sequence[Worker]:
        roster = self._state.roster(request.model)
        if request.pinned is None:
            return roster.workers
        pinned = roster.get(request.pinned)
        return () if pinned is None else (pinned,)

    def weigh(
        self,
        request: RouteRequest,
        matches: Sequence[Match],
        inflight: Mapping[str, int],
        now: float,
        *,
        everyone: bool = False,
    ) -> Weighed:
        """``inflight``: blocks of the prompt by the worker that computes them. ``everyone``: look at all workers, however many
        there are. Else, where there are many and the policy goes by cost, at some (`candidates`), among them one with room if there
        is one."""
        bound = self._session_worker(request, now)
        roster = self._state.roster(request.model)
        holders = Holders(matches, inflight, self._state.kvbms, self._weights)
        only = self._only(request, roster, bound)
        looked = _Looked(request, inflight, self.thresholds, only)
        most = self._drawn(len(roster))
        if everyone or most == len(roster):
            for worker in roster.workers:
                looked.at(worker)
        else:
            notable = {bound, request.pinned or ""}
            notable.update(w.worker_id for w in holders.most_of_it(roster, self._limits.candidates, self._rng))
            for worker_id in sorted(notable):
                if (known := roster.get(worker_id)) is not None:
                    looked.at(known)
            strangers = () if request.pinned or only else roster.at_random(self._rng)
            found = (worker for worker in strangers if worker.worker_id not in notable and looked.at(worker))
            deque(islice(found, most), maxlen=0)
        full = looked.full if self._by_cost and looked.room else []
        return Weighed(
            self._estimates(request, holders, looked.room, bound),
            self._estimates(request, holders, full, bound),
            looked.rejected,
            bound,
            only,
            len(roster) - looked.count,
            holders,
        )

    def _drawn(self, workers: int) -> int:
        if not self._by_cost:
            return workers
        return drawn(workers, self.routers, self._limits.exact_workers, self._limits.candidates)

    def _only(self, request: RouteRequest, roster: Roster, bound: str) -> str:
        """The worker of a session that goes nowhere else, as long as that one may take the request at all; else nobody."""
        if self.affinity.mode is not Mode.HARD:
            return ""
        worker = roster.get(bound)
        return bound if worker is not None and why_not(worker, request, self.thresholds) is None else ""

    def choose(self, estimates: Sequence[Estimate]) -> tuple[Estimate, str]:
        """One of them, and the name of the policy that chose it."""
        try:
            chosen_id = self._policy.choose(list(estimates), self._rng).worker_id
        except Exception as problem:
            failure = PolicyFailed(self.policy, "choose", repr(problem))
            failure.__cause__ = problem
        else:
            chosen = next((estimate for estimate in estimates if estimate.worker_id == chosen_id), None)
            if chosen is not None:
                return chosen, self.policy
            failure = PolicyFailed(self.policy, "not_eligible", repr(chosen_id))
        self._policy_failed(failure)
        return self._stand_in.choose(estimates, self._rng), self._stand_in.name

    def observe(self, outcome: Outcome) -> None:
        if self._learner is None:
            return
        try:
            self._learner.observe(outcome)
        except Exception as problem:
            failure = PolicyFailed(self.policy, "observe", repr(problem))
            failure.__cause__ = problem
            self._policy_failed(failure)

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
        factor = min(max(factor, LEAST_FACTOR), MOST_FACTOR)
        return Bias(factor, self._limits.affinity_bonus_s if last else 0.0, usual.others, usual.length)

    def _bias_of_hints(self, request: RouteRequest) -> Bias:
        """See `cost`: others, length."""
        hints, usual = request.hints, self._weights.expected_output_tokens
        expected = min(hints.osl or usual, request.max_tokens)
        length = min(max(expected / usual, 1 / MOST_LENGTH), MOST_LENGTH)
        return Bias(others=1 / (1 + max(hints.latency_sensitivity or 0.0, 0.0)), length=length)
