"""Whether another worker computes the prompt for the one that was chosen, and which.

    local  = max(wait, 0) + onboarding + prefill                    as in `cost`, on the chosen worker
    remote = max(ready, wait) + rest                                the chosen worker computes the last, partial block itself
        ready    = handover + onboarding there + max(wait there + prefill there, transfer) + the last chunk's transfer
        handover = messages until the first block comes and after the last one has; measured by the chosen worker
        transfer = blocks that the chosen worker lacks / the rate at which it has read others (until then: a prior)
    cost   = time + others * work * prefill + disturb * prefill * (running requests where it is computed)

The last two terms are what the prefill does to others there. A worker with the role ``prefill`` is there for that: the first of
them is not counted. So a long prompt goes to the prefill workers, a short rest is computed at once, and when the prefill workers
are behind everything is computed where it is needed: all by predicted time. The wait and what is cached there overlap with the
transfer.
"""

from collections.abc import Sequence
from enum import StrEnum
from heapq import nlargest, nsmallest

import msgspec

from kvbus_router.core.cost import estimate
from kvbus_router.core.eligibility import request_limit
from kvbus_router.core.estimate import Estimate, Onboarding
from kvbus_router.core.limits import Thresholds, Weights
from kvbus_router.core.prefills import RemotePrefills
from kvbus_router.core.roster import Roster
from kvbus_router.core.sources import REMOTE, Holders
from kvbus_router.core.workers import Worker
from kvbus_wire.records import WorkerRecord
from kvbus_wire.router import PrefillTerms, RouteRequest
from kvbus_wire.worker import RemotePrefill

CANDIDATES = 16
"""Of many prefill workers so many are looked at for what waits there, and as many for what they hold."""
SAME_HOST_ONLY = frozenset({"shm"})


class NoPair(StrEnum):
    """Why a worker does not compute prompts for the chosen one."""

    OTHER_LAYOUT = "other_layout"
    NO_WAY = "no_way"
    EXCLUDED = "excluded"
    DRAINING = "draining"
    CORDONED = "cordoned"
    FULL = "full"


class PairPlan(msgspec.Struct, frozen=True):
    """``terms``: of those that could compute the prompt, the best first. ``prefill``: who does; None: the chosen one itself.
    ``chosen``: the terms of the chosen one with that. ``computed_tokens``: what the other one has to compute."""

    chosen: Estimate
    terms: tuple[PrefillTerms, ...] = ()
    prefill: RemotePrefill | None = None
    computed_tokens: int = 0


class PairPlanner:
    """``most``: so many candidates are explained."""

    def __init__(self, prefills: RemotePrefills, weights: Weights, most: int) -> None:
        self._prefills = prefills
        self._weights = weights
        self._most = most

    def plan(
        self, request: RouteRequest, chosen: Estimate, roster: Roster, holders: Holders, thresholds: Thresholds
    ) -> PairPlan:
        """``chosen``: of the worker that gets the request. Costs nothing where there is nobody who prefills for others."""
        decode = roster.get(chosen.worker_id)
        if decode is None or not self._weights.remote_prefill or not decode.worker.transfers:
            return PairPlan(chosen)
        moved = _moved_tokens(request, chosen, decode)
        if moved <= 0:
            return PairPlan(chosen)
        found = [
            self._terms(request, chosen, decode, other, holders, thresholds, moved)
            for other in self._candidates(request, roster, decode, holders)
            if other is not decode
        ]
        # Of two that are about as soon, the one that has less to compute: so a fan-out is computed by one.
        work = self._weights.work_weight
        able = sorted((t for t in found if not t.verdict), key=lambda t: (t.cost_s + work * t.prefill_s, t.worker_id))
        terms = (*able, *(t for t in found if t.verdict))[: self._most]
        if not able or (able[0].cost_s >= able[0].local_cost_s and request.prefill_pinned is None):
            return PairPlan(chosen, terms)
        best = able[0]
        worker = roster.get(best.worker_id)
        if worker is None:
            raise AssertionError("a worker has left the roster it was taken from")
        prefill = RemotePrefill(worker_id=best.worker_id, incarnation=worker.incarnation, tokens=moved)
        return PairPlan(_with_remote(chosen, moved, best.ready_s), terms, prefill, moved - best.cached_tokens)

    def _candidates(self, request: RouteRequest, roster: Roster, decode: Worker, holders: Holders) -> Sequence[Worker]:
        """The one that the client names; else all, or of many those that have the least to compute, and those that hold the most
        of the prompt."""
        if request.prefill_pinned is not None:
            named = roster.get(request.prefill_pinned)
            return [] if named is None or named.worker.role == "decode" else [named]
        everyone = roster.prefillers(decode.worker.role)
        if len(everyone) <= 2 * CANDIDATES:
            return everyone
        idle = nsmallest(CANDIDATES, everyone, key=self._waiting_tokens)
        held = nlargest(CANDIDATES, everyone, key=holders.depth)
        return [*idle, *(worker for worker in held if holders.depth(worker) and worker not in idle)]

    def _waiting_tokens(self, worker: Worker) -> int:
        return worker.totals.waiting_tokens + self._prefills.on_top(worker.worker_id)[1]

    def _terms(
        self,
        request: RouteRequest,
        chosen: Estimate,
        decode: Worker,
        other: Worker,
        holders: Holders,
        thresholds: Thresholds,
        moved: int,
    ) -> PrefillTerms:
        requests, tokens = self._prefills.on_top(other.worker_id)
        verdict = _why_not(request, decode, other, thresholds, requests)
        if verdict is not None:
            return PrefillTerms(worker_id=other.worker_id, verdict=verdict.value)
        weights = self._weights
        there = estimate(other, request.prompt_tokens, holders.cached(other), weights)
        rest = chosen.uncached_tokens - moved
        # What lies there already is read without any wait for the engine.
        computes = there.cached_tokens < chosen.cached_tokens + chosen.inflight_tokens + chosen.onboard_tokens + moved
        wait_s = there.wait_s + tokens / there.prefill_tokens_per_s if computes else 0.0
        prefill_s = max(0.0, there.prefill_s - rest / there.prefill_tokens_per_s)
        rate = decode.onboard_tokens_per_s(REMOTE) or decode.prefill_tokens_per_s * weights.remote_speedup
        transfer_s = moved / rate
        last_s = min(moved, other.worker.max_batched_tokens) / rate
        handover_s = decode.handover_s or weights.handover_s
        ready_s = handover_s + there.onboard_s + max(wait_s + prefill_s, transfer_s - last_s) + last_s
        rest_s = rest / chosen.prefill_tokens_per_s
        remote_s = max(ready_s, chosen.onboard_s, chosen.wait_s) + rest_s
        work = 0.0 if other.worker.role == "prefill" else chosen.bias.others * weights.work_weight
        cost_s = remote_s + prefill_s * (work + weights.disturb_weight * there.running)
        disturbs_s = chosen.prefill_s * weights.disturb_weight * chosen.running
        return PrefillTerms(
            worker_id=other.worker_id,
            cost_s=cost_s,
            local_cost_s=chosen.ttft_s + chosen.work_s + disturbs_s,
            ready_s=ready_s,
            local_s=chosen.ttft_s,
            wait_s=wait_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            cached_tokens=min(there.cached_tokens + there.inflight_tokens, moved),
            tokens=moved,
        )


def _moved_tokens(request: RouteRequest, chosen: Estimate, decode: Worker) -> int:
    """Whole blocks before the last token that the chosen worker would have to compute."""
    block_size = decode.worker.model.block_size
    most = max(0, request.prompt_tokens - 1) // block_size * block_size
    return most - (request.prompt_tokens - chosen.uncached_tokens)


def _why_not(
    request: RouteRequest, decode: Worker, other: Worker, thresholds: Thresholds, on_top: int
) -> NoPair | None:
    mine, theirs = decode.worker, other.worker
    if not is_same_layout(mine, theirs):
        return NoPair.OTHER_LAYOUT
    common = set(mine.transfers) & set(theirs.transfers)
    if decode.record.host_id != other.record.host_id:
        common -= SAME_HOST_ONLY
    if not common:
        return NoPair.NO_WAY
    if other.worker_id in request.excluded:
        return NoPair.EXCLUDED
    if other.draining:
        return NoPair.DRAINING
    if other.worker_id in thresholds.cordoned:
        return NoPair.CORDONED
    active = other.totals.active + on_top
    if active and active >= request_limit(other, thresholds):
        return NoPair.FULL
    return None


def is_same_layout(mine: WorkerRecord, theirs: WorkerRecord) -> bool:
    """Whether blocks of the one can be used by the other as they are."""
    return (
        mine.model.fingerprint == theirs.model.fingerprint
        and mine.model.kv_layout == theirs.model.kv_layout
        and mine.model.block_size == theirs.model.block_size
        and mine.block_bytes == theirs.block_bytes
        and mine.handover == theirs.handover
    )


def _with_remote(chosen: Estimate, moved: int, ready_s: float) -> Estimate:
    """As `Onboarding` from the other worker; what is left of the wait does not count twice."""
    rest_s = (chosen.uncached_tokens - moved) / chosen.prefill_tokens_per_s
    seconds = max(0.0, ready_s - chosen.wait_s - chosen.onboard_s)
    return msgspec.structs.replace(
        chosen,
        onboard=(*chosen.onboard, Onboarding(REMOTE, moved, seconds)),
        uncached_tokens=chosen.uncached_tokens - moved,
        work_s=chosen.work_s * rest_s / chosen.prefill_s if chosen.prefill_s else chosen.work_s,
        prefill_s=rest_s,
    )


def in_place(estimates: list[Estimate], before: Estimate, after: Estimate) -> list[Estimate]:
    return [after if each is before else each for each in estimates]
