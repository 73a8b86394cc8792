"""Which workers may take a request, and which of them have room for it now.

A worker that may not is out of the question however long the request waits. (A cordoned one still takes what is pinned to it: so it
can be tried out, and the other choices of a request follow the first. But no speculative prefill, since the request that would find
it there goes elsewhere.) One without room is only at a limit: the request goes
elsewhere or waits. A worker without any request has room whatever the thresholds say, so no threshold can lock a request out.
"""

from enum import StrEnum

from kvbus_router.core.limits import Thresholds
from kvbus_router.core.workers import Worker
from kvbus_wire.router import RouteRequest


class Verdict(StrEnum):
    """Why a worker is not among those that are chosen from."""

    PREFILL_ONLY = "prefill_only"
    EXCLUDED = "excluded"
    NOT_PINNED = "not_pinned"
    NOT_ALLOWED = "not_allowed"
    TAINT_MISSING = "taint_missing"
    DRAINING = "draining"
    CORDONED = "cordoned"
    SESSION_ELSEWHERE = "session_elsewhere"
    FULL = "full"
    BUSY_BLOCKS = "busy_blocks"
    BUSY_TOKENS = "busy_tokens"


def why_not(worker: Worker, request: RouteRequest, thresholds: Thresholds) -> Verdict | None:
    """None when the worker may take the request."""
    worker_id = worker.worker_id
    if worker.worker.role == "prefill":
        return Verdict.PREFILL_ONLY
    if worker_id in request.excluded:
        return Verdict.EXCLUDED
    if request.pinned is not None and worker_id != request.pinned:
        return Verdict.NOT_PINNED
    if request.allowed and worker_id not in request.allowed:
        return Verdict.NOT_ALLOWED
    if request.required_taints and not set(request.required_taints) <= set(worker.worker.taints):
        return Verdict.TAINT_MISSING
    if worker.draining:
        return Verdict.DRAINING
    if worker_id in thresholds.cordoned and (request.pinned is None or request.speculative):
        return Verdict.CORDONED
    return None


def why_no_room(worker: Worker, thresholds: Thresholds) -> Verdict | None:
    """None when the worker has room for one more request now."""
    totals = worker.totals
    if not totals.active:
        return None
    if totals.active >= request_limit(worker, thresholds):
        return Verdict.FULL
    if 0 < thresholds.busy_waiting_tokens <= totals.waiting_tokens:
        return Verdict.BUSY_TOKENS
    share = thresholds.busy_used_blocks_share
    if share > 0 and worker.total_blocks > 0 and worker.used_blocks >= share * worker.total_blocks:
        return Verdict.BUSY_BLOCKS
    return None


def request_limit(worker: Worker, thresholds: Thresholds) -> int:
    if thresholds.max_requests_per_worker > 0:
        return thresholds.max_requests_per_worker
    return max(1, int(worker.worker.max_num_seqs * thresholds.worker_limit_factor))
