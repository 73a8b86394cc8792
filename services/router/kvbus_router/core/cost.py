"""What it would cost to run a request on a worker, in seconds.

    predicted TTFT = wait + onboarding + prefill
        wait       = tokens still to prefill there / its prefill rate, and, when all its slots are taken, until one becomes free
        onboarding = tokens that come from a lower tier of the host / the rate of that
        prefill    = tokens that nobody there has / its prefill rate
    cost           = predicted TTFT + what the request does to others
        work       = work_weight * prefill: the worker computes that instead of something else. It is what makes a fan-out of equal
                     prompts wait for the one worker that computes their prefix, instead of computing it everywhere
        decode     = decode_weight * (running requests) * (time of a decode step): steps get longer for all of them

Rates are those that the worker measures. Onboard or recompute is thereby a question of time, not of a fixed credit.
"""

import msgspec

from kvbus_router.core.limits import Weights
from kvbus_router.core.workers import Worker
from kvbus_wire.records import InstanceRecord


class Cached(msgspec.Struct, frozen=True):
    """What of a prompt is where, in blocks from its beginning on. ``inflight``: is being computed on the worker."""

    g1: int = 0
    inflight: int = 0
    host: int = 0
    kvbm: InstanceRecord | None = None


class Estimate(msgspec.Struct, frozen=True):
    """Tokens and seconds of one request on one worker. ``uncached_tokens`` have to be computed for it."""

    worker_id: str
    incarnation: int
    cached_tokens: int
    onboard_tokens: int
    uncached_tokens: int
    waiting_tokens: int
    active: int
    running: int
    wait_s: float
    onboard_s: float
    prefill_s: float
    interference_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.onboard_s + self.prefill_s

    @property
    def cost(self) -> float:
        return self.ttft_s + self.interference_s


def estimate(worker: Worker, prompt_tokens: int, cached: Cached, weights: Weights) -> Estimate:
    """``cached`` depths count for whole blocks before the last prompt token, which is always computed."""
    block_size = worker.worker.model.block_size
    most = max(0, prompt_tokens - 1) // block_size * block_size
    rate = worker.prefill_tokens_per_s
    totals = worker.totals
    in_g1 = min(cached.g1 * block_size, most)
    on_worker = min(max(cached.g1, cached.inflight) * block_size, most)
    onboard = max(0, min(cached.host * block_size, most) - on_worker)
    onboard_s = onboard / _onboard_rate(worker, cached.kvbm, weights)
    if onboard_s > onboard / rate:
        onboard, onboard_s = 0, 0.0
    uncached = prompt_tokens - on_worker - onboard
    prefill_s = uncached / rate
    step_s = worker.decode_step_s
    slots = max(1, worker.worker.max_num_seqs)
    wait_s = totals.waiting_tokens / rate
    if totals.active >= slots:
        wait_s += (totals.active - slots + 1) * weights.expected_output_tokens * step_s / slots
    return Estimate(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        cached_tokens=in_g1,
        onboard_tokens=onboard,
        uncached_tokens=uncached,
        waiting_tokens=totals.waiting_tokens,
        active=totals.active,
        running=totals.running,
        wait_s=wait_s,
        onboard_s=onboard_s,
        prefill_s=prefill_s,
        interference_s=weights.work_weight * prefill_s + weights.decode_weight * totals.running * step_s,
    )


def _onboard_rate(worker: Worker, kvbm: InstanceRecord | None, weights: Weights) -> float:
    """Tokens per second: what the host's kvbm has measured, or a prior relative to the prefill."""
    record = worker.worker
    if kvbm is not None and kvbm.kvbm is not None and kvbm.kvbm.onboard_bytes_per_s > 0 and record.block_bytes > 0:
        return kvbm.kvbm.onboard_bytes_per_s / record.block_bytes * record.model.block_size
    return worker.prefill_tokens_per_s * weights.onboard_speedup
