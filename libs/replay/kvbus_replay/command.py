"""`kvbus replay TRACE`: what each policy would have made of a trace, on a cluster that does not exist."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from pathlib import Path
from random import Random

import msgspec

from kvbus_blocks.index import PrefixIndex
from kvbus_replay.help import Help
from kvbus_replay.indexes import index_maker
from kvbus_replay.plots import PlottingMissing, plot, require_plotting
from kvbus_replay.simulation.cluster import Cluster, ClusterShape
from kvbus_replay.simulation.hints import RETENTIONS, Retention
from kvbus_replay.simulation.host_tier import HostShape
from kvbus_replay.simulation.results import Curves, Result, curves_of, result_of
from kvbus_replay.simulation.workers import WorkerShape
from kvbus_replay.trace.calls import Trace, TraceError
from kvbus_replay.trace.mooncake import BLOCK_TOKENS
from kvbus_replay.trace.reading import read_trace
from kvbus_router.adapters.policies import make_policy
from kvbus_router.core.policies import RoutingPolicy
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.settings import BadSettings
from kvbus_worker.engines.mock.timing import TimingModel

ENDLESS_TOKENS = 1 << 40
"""Of KV blocks where nothing has to go."""
DEFAULT_POLICIES = ("kv", "round-robin", "least-loaded")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file: with its trace, all that is needed to make it again. ``calls``: of the trace that were taken; ``policies`` in
    the order in which they were asked for."""

    trace: str
    block_size: int
    calls: int
    cluster: ClusterShape
    seed: int
    policies: dict[str, Result]


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    policies = arguments.policy or list(DEFAULT_POLICIES)
    retentions: list[Retention] = arguments.retention or ["off"]
    try:
        makers = {name: _maker(name) for name in policies}
        if arguments.plot is not None:
            require_plotting()
        trace = read_trace(
            arguments.trace, mooncake_block_size=arguments.mooncake_block_size, max_calls=arguments.max_calls
        )
    except (TraceError, BadSettings, PlottingMissing) as problem:
        print(f"kvbus replay: {problem}", file=sys.stderr)
        return 2
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            print(f"kvbus replay: there is no folder {path.parent}", file=sys.stderr)
            return 2
    shape = _shape(arguments, trace)
    make_index = index_maker(lambda text: print(f"kvbus replay: {text}", file=sys.stderr))
    if arguments.pressure:
        name, make = next(iter(makers.items()))
        shape = under_pressure(trace, shape, arguments.pressure, name, make(), seed=arguments.seed, index=make_index())
        print(f"each worker holds {shape.worker.kv_tokens} tokens", flush=True)
    runs = []
    for (name, make), retention in product(makers.items(), retentions):
        label = name if len(retentions) == 1 else f"{name}/{retention}"
        shape = msgspec.structs.replace(shape, retention=retention)
        result, curves = run_policy(trace, shape, label, make(), seed=arguments.seed, index=make_index())
        runs.append((result, curves))
        print(line_of(result), flush=True)
        if failures := why_failed(result, trace, shape):
            print(f"kvbus replay: {failures}", file=sys.stderr)
    if same := retentions_alike([result for result, _ in runs], len(retentions)):
        print(f"kvbus replay: {same}", file=sys.stderr)
    report = Report(
        trace=trace.name,
        block_size=trace.block_size,
        calls=len(trace.calls),
        cluster=shape,
        seed=arguments.seed,
        policies={result.policy: result for result, _ in runs},
    )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if arguments.plot is not None:
        plot(arguments.plot, f"{trace.name} on {shape.workers} workers", runs)
    if not any(result.calls for result, _ in runs):
        print("kvbus replay: no call came to its end, so there is nothing to compare", file=sys.stderr)
        return 1
    return 0


def why_failed(result: Result, trace: Trace, shape: ClusterShape) -> str:
    """For the person at the terminal; empty when no call has failed."""
    if not result.failed:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(result.failed.items()))
    longest = max(call.prompt_tokens + call.output_tokens for call in trace.calls)
    hint = ""
    if longest > shape.worker.kv_tokens:
        hint = f"; the longest call has {longest} tokens, and the KV blocks of a worker hold {shape.worker.kv_tokens} (--kv-tokens)"
    return f"{result.policy}: calls failed: {reasons}{hint}"


def retentions_alike(results: Sequence[Result], retentions: int) -> str:
    """For the person at the terminal, where what callers say made no difference to any policy; ``results``: in the order of the
    runs, each policy with each of so many ``retentions``. Empty when it made one, or only one was asked for."""
    groups = [results[at : at + retentions] for at in range(0, len(results), retentions)]
    alike = [{_outcome(result) for result in group} for group in groups]
    if retentions < 2 or any(len(different) > 1 for different in alike):
        return ""
    return (
        "the lines are the same whatever --retention says: it matters only where blocks have to go; "
        "give --pressure X (2, say), or fewer --kv-tokens"
    )


def _outcome(result: Result) -> bytes:
    """All but what it was asked for, and how long it took here."""
    return msgspec.json.encode(msgspec.structs.replace(result, policy="", retention="", wall_s=0.0))


def run_policy(
    trace: Trace, shape: ClusterShape, name: str, policy: RoutingPolicy, *, seed: int, index: PrefixIndex
) -> tuple[Result, Curves]:
    started = time.perf_counter()
    cluster = Cluster(trace, shape, policy, rng=Random(seed), index=index)
    cluster.run()
    return result_of(name, cluster, time.perf_counter() - started), curves_of(cluster)


def under_pressure(
    trace: Trace,
    shape: ClusterShape,
    pressure: float,
    name: str,
    policy: RoutingPolicy,
    *,
    seed: int,
    index: PrefixIndex,
) -> ClusterShape:
    """The same cluster with so few KV blocks that the open sessions need ``pressure`` times of them, at their peak, and the longest
    call still fits. How much these need is tried out with endless ones."""
    endless = msgspec.structs.replace(shape.worker, kv_tokens=ENDLESS_TOKENS)
    tried = msgspec.structs.replace(shape, worker=endless, host=HostShape())
    result, _ = run_policy(trace, tried, name, policy, seed=seed, index=index)
    longest = max(call.prompt_tokens + call.output_tokens for call in trace.calls) + trace.block_size
    each = int(result.working_set_tokens / pressure / shape.workers)
    worker = msgspec.structs.replace(shape.worker, kv_tokens=max(each, longest))
    return msgspec.structs.replace(shape, worker=worker)


def line_of(result: Result) -> str:
    ttft, gaps, queue = result.ttft_s, result.inter_token_s, result.router_queue_s
    failed = f", {sum(result.failed.values())} failed" if result.failed else ""
    return (
        f"{result.policy:<14} hit {result.hit_rate:6.2%} (oracle {result.oracle_hit_rate:6.2%})"
        f"  TTFT p50 {ttft.p50:.3f} p90 {ttft.p90:.3f} p99 {ttft.p99:.3f} s"
        f"  resumed: {result.recomputed_share:.1%} anew, TTFT p50 {result.resumed_ttft_s.p50:.3f} s"
        f"  inter-token p50 {1000 * gaps.p50:.1f} p99 {1000 * gaps.p99:.1f} ms"
        f"  queue p99 {queue.p99:.2f} + {result.engine_queue_s.p99:.2f} s  busiest {result.busy_share.peak:.2f} x mean"
        f"  [{result.calls} calls{failed}, {result.events / max(result.wall_s, 1e-9):,.0f} events/s]"
    )


def _maker(name: str) -> Callable[[], RoutingPolicy]:
    """A policy keeps state, so each run has its own. Raise BadSettings now for one that is not there."""
    make_policy(name)
    return lambda: make_policy(name)


def _shape(arguments: argparse.Namespace, trace: Trace) -> ClusterShape:
    timing = TimingModel(prefill_tokens_per_s=arguments.prefill_tokens_per_s, speedup=arguments.speedup)
    worker = WorkerShape(
        kv_tokens=max(arguments.kv_tokens, trace.block_size),
        max_num_seqs=arguments.max_num_seqs,
        max_batched_tokens=arguments.max_batched_tokens,
        timing=timing,
    )
    host = HostShape(
        g2_tokens=arguments.g2_tokens,
        workers=arguments.workers_per_host,
        copy_tokens_per_s=arguments.copy_tokens_per_s,
    )
    return ClusterShape(workers=arguments.workers, worker=worker, host=host)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus replay",
        formatter_class=Help,
        description="Replay a trace of agent sessions, or a Mooncake trace, on a simulated cluster: the real cores of router, "
        "index and mock engine under a virtual clock. Equal arguments give equal results.",
    )
    parser.add_argument(
        "trace", type=Path, help="JSON lines, also .gz; `kvbus trace synth` and `trace record` write them"
    )
    parser.add_argument("--workers", type=_positive, default=64, metavar="N", help="how many there are")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="P",
        help=f"may be given several times (default: {', '.join(DEFAULT_POLICIES)})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib: extra plot)")
    parser.add_argument("--seed", type=int, default=0, help="of what policies leave to chance")
    parser.add_argument(
        "--max-calls", type=_count, default=0, metavar="N", help="only the first N calls of the trace; 0: all"
    )
    parser.add_argument(
        "--mooncake-block-size", type=_positive, default=BLOCK_TOKENS, metavar="TOKENS", help="of a hash id"
    )
    parser.add_argument(
        "--retention",
        action="append",
        choices=RETENTIONS,
        help="what callers say of their blocks: on: prompts are pinned for 5 minutes, what ended sessions held is "
        "dropped; off: nothing; lru: nothing, and the least recently used go first; may be given several times (default: off). It "
        "makes a difference only where blocks have to go: see --pressure",
    )
    parser.add_argument(
        "--pressure",
        type=_rate,
        metavar="X",
        help="instead of --kv-tokens: so few that the open sessions need X times of them (tried out before, with endless ones); "
        "above 1 blocks have to go",
    )
    engine, shape = parser.add_argument_group("each worker"), WorkerShape()
    engine.add_argument("--kv-tokens", type=_positive, default=shape.kv_tokens, help="what its KV blocks hold")
    engine.add_argument("--max-num-seqs", type=_positive, default=shape.max_num_seqs, help="requests in one step")
    engine.add_argument(
        "--max-batched-tokens", type=_positive, default=shape.max_batched_tokens, help="tokens computed in one step"
    )
    engine.add_argument(
        "--prefill-tokens-per-s",
        type=_rate,
        default=shape.timing.prefill_tokens_per_s,
        help="how fast it computes prompts",
    )
    engine.add_argument("--speedup", type=_rate, default=1.0, help="all times of the engine divided by this")
    host, tier = parser.add_argument_group("each host"), HostShape()
    host.add_argument("--g2-tokens", type=_count, default=0, help="what kvbm holds in its memory (0: there is no kvbm)")
    host.add_argument("--workers-per-host", type=_positive, default=tier.workers, help="that share its memory")
    host.add_argument(
        "--copy-tokens-per-s", type=_rate, default=tier.copy_tokens_per_s, help="of a worker, to or from its host"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError("must be positive")
    return value
