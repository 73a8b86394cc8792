"""What came of one run, as it is written to the JSON file."""

from collections.abc import Sequence
from statistics import fmean, pstdev

import msgspec

from kvbus_replay.simulation.cluster import Cluster
from kvbus_replay.simulation.measures import Distribution, distribution


class Spread(msgspec.Struct, frozen=True):
    """How evenly something lies on the workers. ``deviation``: standard deviation over mean; ``peak``: maximum over mean."""

    mean: float
    min: float
    max: float
    deviation: float
    peak: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. Shares are of prompt tokens: ``hit_rate`` were cached on the worker, ``oracle_hit_rate`` would have been in one
    infinite cache that all share, asked at the same moments. Of the calls that go on with a session, ``recomputed_share`` is what
    was computed anew of the tokens that had been computed before. ``working_set_tokens``: of the sessions that were open at once,
    without what they share, at their peak. Times are seconds; ``ttft_s`` counts from the arrival of a call,
    ``inter_token_s`` are the gaps between the tokens of all outputs, ``simulated_s`` ends with the last call."""

    policy: str
    calls: int
    failed: dict[str, int]
    retries: int
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    oracle_hit_rate: float
    onboarded_share: float
    retention: str = "off"
    resumed_tokens: int = 0
    recomputed_share: float = 0.0
    working_set_tokens: int = 0
    resumed_ttft_s: Distribution = distribution(())
    ttft_s: Distribution
    total_s: Distribution
    inter_token_s: Distribution
    router_queue_s: Distribution
    engine_queue_s: Distribution
    busy_share: Spread
    calls_per_worker: Spread
    computed_tokens_per_worker: Spread
    preemptions: int
    blocks: int
    index_entries: int
    simulated_s: float
    wall_s: float
    events: int


class Curves(msgspec.Struct, frozen=True):
    """What plots show beyond the result. ``ttft_s`` ascends; ``busy_share`` per worker, descending."""

    ttft_s: list[float]
    busy_share: list[float]
    arrived_s: list[float]
    ttft_of_arrival_s: list[float]
    resumed_ttft_s: list[float]


def result_of(policy: str, cluster: Cluster, wall_s: float) -> Result:
    records, workers = cluster.records, list(cluster.workers.values())
    prompt = max(records.prompt_tokens, 1)
    simulated_s = cluster.last_end_s
    sizes = cluster.index.sizes()
    return Result(
        policy=policy,
        calls=len(records.ttft_s),
        failed=records.failed,
        retries=records.retries,
        prompt_tokens=records.prompt_tokens,
        output_tokens=records.output_tokens,
        hit_rate=records.cached_tokens / prompt,
        oracle_hit_rate=records.oracle_tokens / prompt,
        onboarded_share=records.onboarded_tokens / prompt,
        retention=cluster.retention,
        resumed_tokens=records.resumed_tokens,
        recomputed_share=records.recomputed_tokens / max(records.resumed_tokens, 1),
        working_set_tokens=records.working_set_tokens,
        resumed_ttft_s=distribution(records.resumed_ttft_s),
        ttft_s=distribution(records.ttft_s),
        total_s=distribution(records.total_s),
        inter_token_s=records.inter_token_s.distribution(),
        router_queue_s=distribution(records.router_queue_s),
        engine_queue_s=distribution(records.engine_queue_s),
        busy_share=spread([worker.busy_s / simulated_s if simulated_s else 0.0 for worker in workers]),
        calls_per_worker=spread([worker.calls for worker in workers]),
        computed_tokens_per_worker=spread([worker.computed_tokens for worker in workers]),
        preemptions=sum(worker.scheduler.preemptions for worker in workers),
        blocks=len(cluster.oracle),
        index_entries=sizes.entries,
        simulated_s=simulated_s,
        wall_s=wall_s,
        events=cluster.clock.events,
    )


def curves_of(cluster: Cluster) -> Curves:
    records = cluster.records
    simulated_s = cluster.last_end_s or 1.0
    return Curves(
        ttft_s=sorted(records.ttft_s),
        busy_share=sorted((worker.busy_s / simulated_s for worker in cluster.workers.values()), reverse=True),
        arrived_s=list(records.arrived_s),
        ttft_of_arrival_s=list(records.ttft_s),
        resumed_ttft_s=sorted(records.resumed_ttft_s),
    )


def spread(values: Sequence[float]) -> Spread:
    mean = fmean(values) if values else 0.0
    if not mean:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    return Spread(mean, min(values), max(values), pstdev(values) / mean, max(values) / mean)
