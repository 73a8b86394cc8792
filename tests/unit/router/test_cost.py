"""Seconds, term by term. Workers compute 1,000 tokens/s in blocks of 16, and each test's prompt has ten whole blocks."""

import msgspec
import pytest

from kvbus_router.core.cost import Cached, Source, estimate
from kvbus_router.core.estimate import Bias, Estimate
from kvbus_router.core.limits import Weights
from kvbus_router.core.sources import Holders
from kvbus_router.core.workers import Worker
from kvbus_testkit.routing import g1, kvbm_record, report, worker_record
from kvbus_wire.indexer import Match
from kvbus_wire.records import InstanceRecord

PROMPT = 170


def worker(record: InstanceRecord | None = None, **load: object) -> Worker:
    made = record or worker_record("w1")
    assert made.worker is not None
    result = Worker(made, made.worker)
    if load:
        result.update(report(made.instance_id, **load), 0.0, 5.0)  # type: ignore[arg-type]
    return result


def onboarded(estimate: Estimate) -> dict[str, int]:
    return {part.source: part.tokens for part in estimate.onboard}


def from_sources(*sources: Source, on_device: int = 0) -> Estimate:
    return estimate(worker(), PROMPT, Cached(g1=on_device, sources=sources), Weights())


def test_every_term_is_in_seconds_and_they_add_up() -> None:
    loaded = worker(running=2, waiting_tokens=500)
    found = estimate(
        loaded, PROMPT, Cached(g1=2, inflight=4, sources=[Source("g2", 8, 6400.0)]), Weights(decode_weight=1.0)
    )
    assert (found.cached_tokens, found.inflight_tokens, found.onboard_tokens, found.uncached_tokens) == (32, 32, 64, 42)
    assert found.wait_s == pytest.approx(0.5)
    assert found.onboard_s == pytest.approx(0.01)
    assert found.prefill_s == pytest.approx(0.042)
    assert found.work_s == pytest.approx(0.25 * 0.042)
    assert found.decode_s == pytest.approx(2 * 0.01)
    assert found.ttft_s == pytest.approx(0.552)
    assert found.cost_s == pytest.approx(0.5825)


def test_the_fastest_source_is_used_as_far_as_it_goes_then_the_next() -> None:
    found = from_sources(Source("g4", 10, 2000.0), Source("g2", 4, 10_000.0), Source("g3", 7, 4000.0), on_device=1)
    assert onboarded(found) == {"g2": 48, "g3": 48, "g4": 48}
    assert [part.seconds for part in found.onboard] == pytest.approx([0.0048, 0.012, 0.024])


def test_a_slow_source_that_goes_less_far_than_a_fast_one_is_not_used() -> None:
    assert onboarded(from_sources(Source("g3", 4, 2000.0), Source("g2", 8, 4000.0))) == {"g2": 128}


def test_what_is_computed_faster_than_fetched_is_computed() -> None:
    found = from_sources(Source("g2", 4, 5000.0), Source("g4", 10, 1000.0))
    assert (onboarded(found), found.uncached_tokens) == ({"g2": 64}, 106)
    assert onboarded(from_sources(Source("g4", 10, 1000.1))) == {"g4": 160}


@pytest.mark.parametrize("tokens_per_s", [0.0, -1.0, float("nan"), 1000.0])
def test_a_rate_that_is_none_is_not_counted_on(tokens_per_s: float) -> None:
    assert from_sources(Source("g2", 10, tokens_per_s)).onboard == ()


def test_taints_scale_the_cost_and_affinity_is_taken_off() -> None:
    plain = estimate(worker(), PROMPT, Cached(), Weights())
    biased = estimate(worker(), PROMPT, Cached(), Weights(), Bias(taint_factor=2.0, affinity_s=0.1))
    assert biased.cost_s == pytest.approx(2 * plain.cost_s - 0.1)
    assert biased.ttft_s == plain.ttft_s


def held(at: Worker, *matches: Match, kvbms: tuple[InstanceRecord, ...] = ()) -> dict[str, tuple[int, float]]:
    holders = Holders(matches, {}, {kvbm.instance_id: kvbm for kvbm in kvbms}, Weights())
    return {source.name: (source.depth, source.tokens_per_s) for source in holders.cached(at).sources}


def test_priors_hold_until_a_tier_was_measured_there() -> None:
    matches = [Match(instance_id="kvbm-h", tier=tier, depth=depth) for tier, depth in [("g2", 3), ("g3", 7), ("g4", 9)]]
    kvbm = kvbm_record("h")
    assert held(worker(), *matches, kvbms=(kvbm,)) == {"g2": (3, 10_000), "g3": (7, 4000), "g4": (9, 2000)}
    measured = worker(onboard={"g2": 77_000.0, "g4": 500.0})
    assert held(measured, *matches, kvbms=(kvbm,)) == {"g2": (3, 77_000), "g3": (7, 4000), "g4": (9, 500)}


def test_what_kvbm_measured_at_its_start_counts_before_the_prior() -> None:
    probed = kvbm_record("h", bytes_per_s=5_000_000.0)
    match = Match(instance_id="kvbm-h", tier="g2", depth=3)
    with_bytes = worker(worker_record("w1", block_bytes=1600))
    assert held(with_bytes, match, kvbms=(probed,)) == {"g2": (3, 50_000)}
    assert held(worker(), match, kvbms=(probed,)) == {"g2": (3, 10_000)}, (
        "a worker that exports nothing has no block size"
    )


def test_lower_tiers_of_another_host_are_out_of_reach_but_the_clusters_store_is_not() -> None:
    here, there = kvbm_record("here"), kvbm_record("there")
    matches = [Match(instance_id="kvbm-there", tier=tier, depth=5) for tier in ("g2", "g3", "g4")]
    at = worker(worker_record("w1", host="here"))
    assert set(held(at, *matches, kvbms=(here, there))) == {"g4"}
    assert held(at, *matches, kvbms=(there,)) == {}, "the store is reached through the kvbm of the host"


def test_a_prediction_counts_as_being_computed_or_as_held_where_no_event_will_ever_tell() -> None:
    matches = [
        Match(instance_id="w1", tier="g1", depth=5, predicted=True),
        Match(instance_id="w1", tier="g1", depth=3),
    ]
    for kv_events, expected in ((True, (3, 5)), (False, (5, 0))):
        at = worker()
        at.worker = msgspec.structs.replace(at.worker, kv_events=kv_events)
        cached = Holders(matches, {}, {}, Weights()).cached(at)
        assert (cached.g1, cached.inflight) == expected


def test_a_kvbm_that_is_gone_and_a_tier_that_nobody_knows_count_for_nothing() -> None:
    matches = [Match(instance_id="gone", tier="g2", depth=5), Match(instance_id="kvbm-h", tier="g9", depth=5)]
    assert held(worker(), *matches, kvbms=(kvbm_record("h"),)) == {}


def test_other_workers_are_a_source_only_for_those_that_can_read_from_them() -> None:
    matches = [g1("w1", 8), g1("w2", 6), g1("w3", 4)]
    reader = worker(worker_record("w1", reads_remote=True))
    other_reader = worker(worker_record("w2", reads_remote=True))
    assert held(reader, *matches) == {"remote": (6, 4000)}, "its own device is no remote one"
    assert held(other_reader, *matches) == {"remote": (8, 4000)}
    assert held(worker(), *matches) == {}
    assert held(reader, g1("w1", 8)) == {}
    measured = worker(worker_record("w1", reads_remote=True), onboard={"remote": 123.0})
    assert held(measured, *matches) == {"remote": (6, 123)}
