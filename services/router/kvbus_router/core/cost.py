"""What it would cost to run a request on a worker, in seconds.

    predicted TTFT = wait + onboarding + prefill
        wait       = tokens still to prefill there / its prefill rate, and, when all its slots are taken, until one becomes free: by
                     the output that is left of those that run there (`busy`)
        onboarding = tokens that come from lower tiers or from another worker / the rate of each
        prefill    = tokens that nobody there has / its prefill rate
    cost           = (predicted TTFT + others * what the request does to others) * taints - affinity
        work       = work_weight * prefill: the worker computes that instead of something else. It is what makes a fan-out of equal
                     prompts wait for the one worker that computes their prefix, instead of computing it everywhere
        decode     = decode_weight * (running requests, each as far as it has still to go) * (time of a decode step) * length: steps
                     get longer for all of them, for as long as the request runs. The weight stands for the many steps in which
                     that happens, a little each; 8 is from replay: with less, sessions crowd where their prompts are
        others     = 1 / (1 + latency_sensitivity)
        length     = its expected output (osl) / expected_output_tokens, within 1/8 .. 8
        taints     = product of the factors by which the request prefers or avoids what the worker is tainted with
        affinity   = affinity_bonus_s for the worker that served the session last (`affinity`)

Rates are those that the worker measures. Onboard or recompute is thereby a question of time, not of a fixed credit.
"""

from collections.abc import Sequence

import msgspec

from kvbus_router.core.busy import steps_until_free
from kvbus_router.core.estimate import NO_BIAS, Bias, Estimate, Onboarding
from kvbus_router.core.limits import Weights
from kvbus_router.core.workers import Worker


class Source(msgspec.Struct, frozen=True):
    """Leading blocks of a prompt that can be fetched from there (``name``: g2, g3, g4, remote) at this rate."""

    name: str
    depth: int
    tokens_per_s: float


class Cached(msgspec.Struct, frozen=True):
    """What of a prompt is where, in blocks from its beginning on. ``inflight``: is being computed on the worker."""

    g1: int = 0
    inflight: int = 0
    sources: Sequence[Source] = ()


def estimate(worker: Worker, prompt_tokens: int, cached: Cached, weights: Weights, bias: Bias = NO_BIAS) -> Estimate:
    """``cached`` depths count for whole blocks before the last prompt token, which is always computed."""
    block_size = worker.worker.model.block_size
    most = max(0, prompt_tokens - 1) // block_size * block_size
    rate, step_s = worker.prefill_tokens_per_s, worker.decode_step_s
    totals = worker.totals
    in_g1 = min(cached.g1 * block_size, most)
    on_worker = min(max(cached.g1, cached.inflight) * block_size, most)
    onboard = _onboarding(cached.sources, on_worker, most, block_size, rate)
    uncached = prompt_tokens - on_worker - (sum([part.tokens for part in onboard]) if onboard else 0)
    prefill_s = uncached / rate
    slots = max(1, worker.worker.max_num_seqs)
    wait_s = totals.waiting_tokens / rate
    if totals.active >= slots:
        wait_s += step_s * steps_until_free(
            worker.occupancy.output_left, totals.active, slots, weights.expected_output_tokens
        )
    return Estimate(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        cached_tokens=in_g1,
        inflight_tokens=on_worker - in_g1,
        onboard=onboard,
        uncached_tokens=uncached,
        waiting_tokens=totals.waiting_tokens,
        active=totals.active,
        running=totals.running,
        prefill_tokens_per_s=rate,
        decode_step_s=step_s,
        wait_s=wait_s,
        prefill_s=prefill_s,
        work_s=bias.others * weights.work_weight * prefill_s,
        decode_s=bias.others * weights.decode_weight * worker.occupancy.busy * step_s * bias.length,
        bias=bias,
    )


def _onboarding(
    sources: Sequence[Source], start: int, most: int, block_size: int, prefill_tokens_per_s: float
) -> tuple[Onboarding, ...]:
    """Each source holds a prefix, so the fastest is used as far as it goes, then the next fastest from there on. One that is slower
    than computing is not used, and nothing behind it either: there are only slower ones."""
    if not sources:
        return ()
    parts = []
    at = start
    for source in sorted(sources, key=lambda source: -source.tokens_per_s) if len(sources) > 1 else sources:
        if not source.tokens_per_s > prefill_tokens_per_s:
            break
        tokens = min(source.depth * block_size, most) - at
        if tokens > 0:
            parts.append(Onboarding(source.name, tokens, tokens / source.tokens_per_s))
            at += tokens
    return tuple(parts)
