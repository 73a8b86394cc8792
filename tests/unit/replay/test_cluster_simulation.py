"""The cluster in virtual time, and what the router's policies make of agents' sessions on it."""

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_replay.command import run_policy
from kvbus_replay.simulation.cluster import Cluster, ClusterShape
from kvbus_replay.simulation.host_tier import HostShape
from kvbus_replay.simulation.measures import Weighted, distribution
from kvbus_replay.simulation.results import Result
from kvbus_replay.simulation.workers import WorkerShape
from kvbus_replay.trace.agent_format import AgentTraceReader, encode_line
from kvbus_replay.trace.calls import Call, Chain, Trace
from kvbus_replay.trace.synth import Shape, synthesize
from kvbus_router.core.limits import Limits
from kvbus_router.core.policies import BUILT_IN
from kvbus_worker.engines.mock.timing import TimingModel

SIZE = 16
AGENTS = Shape(
    sessions=24,
    typical_calls=12,
    harnesses=2,
    system_tokens=(8_000, 16_000),
    typical_output_tokens=40,
    max_output_tokens=200,
    compaction_tokens=30_000,
    sub_agent_system_tokens=(2_000, 4_000),
)


def agents(seed: int = 3) -> Trace:
    calls = AgentTraceReader("made up").read(encode_line(line) for line in synthesize(AGENTS, seed))
    return Trace("made up", SIZE, list(calls))


def run(trace: Trace, policy: str = "kv", *, seed: int = 0, shape: ClusterShape | None = None) -> Result:
    shape = shape or ClusterShape(workers=8)
    result, _ = run_policy(trace, shape, policy, BUILT_IN[policy](), seed=seed, index=PlainIndex())
    return msgspec.structs.replace(result, wall_s=0.0)


def cluster(calls: Iterable[Call], *, limits: Limits | None = None, **shape: object) -> Cluster:
    trace = Trace("calls", SIZE, list(calls))
    whole = ClusterShape(**{"workers": 2, **shape})  # type: ignore[arg-type]
    return Cluster(trace, whole, BUILT_IN["kv"](), rng=Random(0), index=PlainIndex(), limits=limits)


def call(name: str, blocks: int = 4, *, first: int = 1, output_tokens: int = 20, **fields: object) -> Call:
    plain = Call(
        call_id=name,
        session_id=name,
        chain=Chain(range(first, first + blocks)),
        prompt_tokens=blocks * SIZE + 1,
        output_tokens=output_tokens,
    )
    return msgspec.structs.replace(plain, **fields)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    trace = agents()
    return {policy: run(trace, policy) for policy in ("kv", "round-robin", "least-loaded")}


def test_kv_finds_nearly_what_one_infinite_cache_would(results: dict[str, Result]) -> None:
    kv = results["kv"]
    assert kv.oracle_hit_rate - kv.hit_rate < 0.02
    assert results["round-robin"].hit_rate < kv.hit_rate - 0.1


def test_kv_answers_agents_several_times_sooner_than_round_robin(results: dict[str, Result]) -> None:
    assert results["round-robin"].ttft_s.p50 > 4 * results["kv"].ttft_s.p50


def test_the_slowest_answers_of_kv_are_no_slower_than_those_of_least_loaded(results: dict[str, Result]) -> None:
    assert results["kv"].ttft_s.p99 <= results["least-loaded"].ttft_s.p99


def test_all_policies_serve_the_same_calls(results: dict[str, Result]) -> None:
    for result in results.values():
        assert (result.calls, result.failed) == (len(agents().calls), {})
        assert result.output_tokens == sum(call.output_tokens for call in agents().calls)
        assert result.hit_rate <= result.oracle_hit_rate


def test_equal_seeds_give_equal_results(results: dict[str, Result]) -> None:
    assert run(agents()) == results["kv"]


def test_decode_steps_planned_together_change_next_to_nothing() -> None:
    trace = Trace("first calls", SIZE, agents().calls[:60])
    together, one_by_one = run(trace), run(trace, shape=ClusterShape(workers=8, max_repeats=1))
    assert together.events < one_by_one.events / 2
    assert together.hit_rate == one_by_one.hit_rate
    assert together.ttft_s.mean == pytest.approx(one_by_one.ttft_s.mean, rel=0.01)
    assert together.inter_token_s.mean == pytest.approx(one_by_one.inter_token_s.mean, rel=0.01)


def test_a_call_waits_for_those_before_it_and_its_pause() -> None:
    run = cluster([call("a"), call("b"), call("c", after=("a", "b"), pause_s=5.0, at_s=1.0), call("d", at_s=60.0)])
    run.run()
    arrived = run.records.arrived_s
    ends = [at + total for at, total in zip(arrived, run.records.total_s, strict=True)]
    assert arrived[2] == pytest.approx(max(ends[:2]) + 5.0)
    assert arrived[3] == 60.0


def test_equal_prompts_at_the_same_moment_are_computed_once() -> None:
    run = cluster([call(name, blocks=500) for name in "abcd"], workers=4)
    run.run()
    computed = sum(worker.computed_tokens for worker in run.workers.values())
    assert computed < 1.1 * (500 * SIZE)
    assert run.records.oracle_tokens == 3 * 500 * SIZE


def test_a_cluster_without_room_keeps_calls_waiting_and_serves_all() -> None:
    limits = Limits(max_requests_per_worker=1)
    run = cluster([call(str(number), first=10 * number) for number in range(10)], limits=limits, workers=1)
    run.run()
    assert len(run.records.ttft_s) == 10
    assert run.dispatcher.state.reservations == run.dispatcher.waiting == 0
    assert sorted(run.records.router_queue_s)[-1] > 8 * min(run.records.total_s)
    run.dispatcher.check_integrity()


def test_a_refused_call_comes_again_until_it_may_no_more() -> None:
    limits = Limits(max_requests_per_worker=1, max_queued=1)
    calls = [call(str(number), first=10 * number, output_tokens=1000) for number in range(6)]
    patient = cluster(calls, limits=limits, workers=1)
    patient.run()
    assert (len(patient.records.ttft_s), patient.records.failed) == (6, {})
    assert patient.records.retries > 0
    impatient = cluster(calls, limits=limits, workers=1, max_retries=0)
    impatient.run()
    assert impatient.records.failed == {"overloaded": 4}


def test_a_prompt_that_no_worker_can_hold_fails_and_its_followers_go_on() -> None:
    small = WorkerShape(kv_tokens=10 * SIZE)
    run = cluster([call("long", blocks=20), call("next", after=("long",))], worker=small)
    run.run()
    assert run.records.failed == {"context_length_exceeded": 1}
    assert len(run.records.ttft_s) == 1
    assert run.dispatcher.state.reservations == 0


def test_a_full_cache_evicts_and_the_index_hears_of_it() -> None:
    small = WorkerShape(kv_tokens=12 * SIZE)
    calls = [call(str(number), first=100 * number, at_s=float(number)) for number in range(8)]
    run = cluster(calls, worker=small, workers=1)
    run.run()
    run.hear_events(float("inf"))
    (worker,) = run.workers.values()
    worker.scheduler.check_integrity()
    run.index.check_integrity()
    assert run.index.sizes().entries == worker.scheduler.cache.cached <= 12


def two_workers_of_one_host(g2_blocks: int, *calls: Call) -> Cluster:
    host = HostShape(g2_tokens=g2_blocks * SIZE, workers=2, copy_tokens_per_s=10_000.0)
    run = cluster(calls, workers=2, host=host, worker=WorkerShape(kv_tokens=40 * SIZE))
    run.run()
    for tier in run.hosts:
        tier.pool.check_integrity()
    for worker in run.workers.values():
        worker.scheduler.check_integrity()
    return run


def test_what_the_device_has_evicted_comes_back_from_the_host() -> None:
    others = [call(str(number), blocks=30, first=100 * number, at_s=10.0 * number) for number in range(1, 4)]
    first = call("first", blocks=30, first=1000)
    again = call("again", blocks=30, first=1000, at_s=50.0)
    run = two_workers_of_one_host(1000, first, *others, again)
    assert run.records.cached_tokens == 30 * SIZE
    assert run.records.onboarded_tokens > 15 * SIZE
    ttft = dict(zip(run.records.arrived_s, run.records.ttft_s, strict=True))
    assert ttft[50.0] > run.records.onboarded_tokens / 10_000.0
    run.hear_events(float("inf"))
    held = sum(run.index.held(owner).keys.buffer_info()[1] for owner in run.index.owners() if owner.tier == "g2")
    assert held == run.hosts[0].pool.usage().present > 100


def test_a_host_without_room_evicts_and_stays_whole() -> None:
    calls = [call(str(number), blocks=30, first=100 * number, at_s=float(number)) for number in range(1, 12)]
    run = two_workers_of_one_host(50, *calls)
    assert run.hosts[0].pool.usage().present <= 50
    assert run.hosts[0].pool.counters.evictions > 0
    assert run.hosts[0].pool.usage().leases == 0


def test_output_without_hashes_is_found_by_nobody() -> None:
    run = cluster([call("a", output_tokens=200), call("b", after=("a",), output_tokens=200)], workers=1)
    run.run()
    assert run.records.cached_tokens == 4 * SIZE


def test_quantiles_are_values_that_were_there() -> None:
    values = distribution([float(value) for value in range(1, 101)])
    assert (values.p50, values.p90, values.p99, values.max, values.mean) == (50.0, 90.0, 99.0, 100.0, 50.5)
    weighted = Weighted()
    for value, weight in ((1.0, 98), (5.0, 1), (9.0, 1)):
        weighted.add(value, weight)
    assert (weighted.distribution().p50, weighted.distribution().p99, weighted.distribution().max) == (1.0, 5.0, 9.0)
    assert distribution([]).count == Weighted().distribution().count == 0


def test_engines_that_take_no_time_do_not_stop_the_clock() -> None:
    free = WorkerShape(timing=TimingModel(speedup=float("inf")))
    run = cluster([call("a"), call("b", after=("a",), pause_s=1.0)], worker=free)
    run.run()
    assert len(run.records.ttft_s) == 2
