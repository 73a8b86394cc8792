"""Why requests went where they did: the terms of recent decisions, for people and tools."""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nsmallest

import msgspec

from kvbus_router.core.eligibility import Verdict
from kvbus_router.core.estimate import Estimate
from kvbus_wire.router import OnboardTerm, PrefillTerms, RouteExplanation, WorkerTerms

Rejected = tuple[str, Verdict]
"""A worker that could not take the request, and why."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. ``chosen``: None when nothing was placed. ``best``: by cost, as many as are kept; ``left_out``: so many more
    workers were looked at."""

    request_id: str
    model: str
    policy: str
    policy_class: str
    tenant: str
    prompt_tokens: int
    chosen: Estimate | None
    queued_s: float
    session_worker_id: str
    best: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    left_out: int
    ttft_s: float | None = None
    prefill_worker_id: str = ""
    prefill: tuple[PrefillTerms, ...] = ()


def ranked(
    estimates: Sequence[Estimate], chosen: Estimate | None, rejected: Sequence[Rejected], most: int
) -> tuple[tuple[Estimate, ...], tuple[Rejected, ...], int]:
    """The cheapest and the chosen one, then those rejected, together at most ``most``; and how many that leaves out."""
    best = nsmallest(most, estimates, key=lambda estimate: estimate.cost_s)
    if chosen is not None and best and chosen not in best:
        best[-1] = chosen
    kept = tuple(rejected[: most - len(best)])
    return tuple(best), kept, len(estimates) + len(rejected) - len(best) - len(kept)


def terms(estimate: Estimate) -> WorkerTerms:
    return WorkerTerms(
        worker_id=estimate.worker_id,
        cost_s=estimate.cost_s,
        ttft_s=estimate.ttft_s,
        wait_s=estimate.wait_s,
        prefill_s=estimate.prefill_s,
        work_s=estimate.work_s,
        decode_s=estimate.decode_s,
        affinity_s=estimate.bias.affinity_s,
        taint_factor=estimate.bias.taint_factor,
        cached_tokens=estimate.cached_tokens,
        inflight_tokens=estimate.inflight_tokens,
        onboard=tuple(OnboardTerm(source=p.source, tokens=p.tokens, seconds=p.seconds) for p in estimate.onboard),
        uncached_tokens=estimate.uncached_tokens,
        waiting_tokens=estimate.waiting_tokens,
        active=estimate.active,
        running=estimate.running,
        prefill_tokens_per_s=estimate.prefill_tokens_per_s,
        decode_step_s=estimate.decode_step_s,
    )


def explanation(decided: Decided, router_id: str) -> RouteExplanation:
    rejected = (WorkerTerms(worker_id=worker_id, verdict=verdict.value) for worker_id, verdict in decided.rejected)
    return RouteExplanation(
        request_id=decided.request_id,
        router_id=router_id,
        model=decided.model,
        policy=decided.policy,
        prompt_tokens=decided.prompt_tokens,
        worker_id=decided.chosen.worker_id if decided.chosen is not None else "",
        queued_s=decided.queued_s,
        ttft_s=decided.ttft_s,
        session_worker_id=decided.session_worker_id,
        workers=(*map(terms, decided.best), *rejected),
        left_out=decided.left_out,
        policy_class=decided.policy_class,
        tenant=decided.tenant,
        prefill_worker_id=decided.prefill_worker_id,
        prefill=decided.prefill,
    )


class DecisionLog:
    """The last decisions by request id; at the limit the oldest are forgotten."""

    def __init__(self, max_decisions: int) -> None:
        self._max_decisions = max_decisions
        self._decisions: OrderedDict[str, Decided] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decided: Decided) -> None:
        self._decisions.pop(decided.request_id, None)
        self._decisions[decided.request_id] = decided
        while len(self._decisions) > self._max_decisions:
            self._decisions.popitem(last=False)

    def get(self, request_id: str) -> Decided | None:
        return self._decisions.get(request_id)

    def first_token(self, request_id: str, ttft_s: float) -> None:
        """The decision, if it is still known, is completed by how long it took."""
        decided = self._decisions.get(request_id)
        if decided is not None:
            self._decisions[request_id] = msgspec.structs.replace(decided, ttft_s=ttft_s)
