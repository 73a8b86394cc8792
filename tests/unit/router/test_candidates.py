"""Which workers of a large cluster a request is compared on."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from kvbus_router.core.candidates import FEWEST, drawn
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued
from kvbus_router.core.eligibility import Verdict
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.policies import KvPolicy, LeastLoadedPolicy, RoutingPolicy
from kvbus_router.core.roster import Roster
from kvbus_router.core.workers import Worker
from kvbus_testkit.routing import chain, g1, kvbm_record, report, request, worker_record
from kvbus_wire.indexer import Match
from kvbus_wire.router import Placement, RouteRequest

MANY = 200
KEYS = chain(*range(1, 6))


def cluster(count: int = MANY, policy: RoutingPolicy | None = None, **limits: int) -> Dispatcher:
    router = Dispatcher("r", Limits(**limits), Weights(), policy or KvPolicy(), Random(1))  # type: ignore[arg-type]
    for number in range(count):
        router.joined(worker_record(f"w{number}", host=f"h{number // 4}"), 0.0)
    return router


def place(router: Dispatcher, asked: RouteRequest, matches: Sequence[Match] = ()) -> Placement:
    outcome, _ = router.submit(asked, matches, 1e6, 0.0)
    router.check_integrity()
    assert isinstance(outcome, Placed)
    return outcome.placement


def asked(request_id: str = "r", session: str = "", pinned: str | None = None) -> RouteRequest:
    return request(request_id, keys=KEYS, prompt_tokens=85, session=session, pinned=pinned, explain=True)


@pytest.mark.parametrize(
    ("workers", "routers", "expected"),
    [
        (64, 1, 64),
        (65, 1, 16),
        (1000, 1, 16),
        (3, 2, 3),
        (64, 2, 16),
        (20, 2, 10),
        (64, 8, 8),
        (64, 100, FEWEST),
        (0, 2, 0),
    ],
)
def test_a_lone_router_compares_a_small_cluster_as_a_whole_and_replicas_each_their_share(
    workers: int, routers: int, expected: int
) -> None:
    assert drawn(workers, routers, 64, 16) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 3, 12, 97])
def test_workers_at_random_are_all_of_them_each_once(count: int) -> None:
    workers = []
    for number in range(count):
        record = worker_record(f"w{number}")
        assert record.worker is not None
        workers.append(Worker(record, record.worker))
    roster = Roster(workers)
    firsts = Counter[str]()
    for seed in range(30):
        seen = [worker.worker_id for worker in roster.at_random(Random(seed))]
        assert sorted(seen) == sorted(worker.worker_id for worker in workers)
        firsts.update(seen[:1])
    assert len(firsts) == min(count, len(firsts))
    assert len(firsts) > 1 or count <= 1


def test_whoever_holds_most_of_a_prompt_is_compared_however_many_there_are() -> None:
    router = cluster()
    shared = [g1(f"w{number}", 1) for number in range(MANY)]
    shared[137] = g1("w137", 5)
    placement = place(router, asked(), shared)
    assert placement.worker_id == "w137"
    told = placement.explanation
    assert told is not None
    assert len(told.workers) + told.left_out == MANY, "those that nobody looked at are counted"


def test_workers_of_the_host_that_holds_most_are_compared() -> None:
    router = cluster()
    router.joined(kvbm_record("h31"), 0.0)
    placement = place(router, asked(), [Match(instance_id="kvbm-h31", tier="g2", depth=5)])
    assert placement.worker_id in {"w124", "w125", "w126", "w127"}
    assert placement.onboard_tokens == 80


def test_whoever_computes_the_prefix_or_served_the_session_is_compared() -> None:
    router = cluster()
    first = place(router, asked("first", session="s"))
    assert place(router, asked("fan-out")).worker_id == first.worker_id
    for request_id in ("first", "fan-out"):
        router.finished(request_id)
    assert place(router, asked("next", session="s")).worker_id == first.worker_id


def test_a_prompt_of_which_all_hold_the_same_part_draws_nobody_to_a_few() -> None:
    router = cluster()
    shared = [g1(f"w{number}", 3) for number in range(MANY)]
    chosen = {place(router, request(f"r{n}", keys=b"", prompt_tokens=85), shared).worker_id for n in range(100)}
    assert len(chosen) > 60


def test_a_pinned_request_finds_its_worker() -> None:
    assert place(cluster(), asked(pinned="w77")).worker_id == "w77"


def test_the_only_worker_with_room_is_found() -> None:
    router = cluster()
    for number in range(MANY):
        if number != 111:
            router.load_report(report(f"w{number}", running=5), 0.0)
    assert place(router, asked()).worker_id == "w111"


def test_without_any_room_a_request_waits_however_many_workers_there_are() -> None:
    router = cluster(max_requests_per_worker=1)
    for number in range(MANY):
        router.load_report(report(f"w{number}", running=1), 0.0)
    assert isinstance(router.submit(asked(), (), 1e6, 0.0)[0], Queued)
    router.load_report(report("w42"), 1.0)
    (settled,) = router.pump(1.0)
    assert isinstance(settled.outcome, Placed)
    assert settled.outcome.placement.worker_id == "w42"


def test_cordoned_workers_take_no_place_among_those_that_are_compared() -> None:
    router = cluster()
    router.set_thresholds(Thresholds(cordoned=tuple(f"w{number}" for number in range(1, MANY))))
    assert place(router, asked()).worker_id == "w0"


def test_an_explanation_without_a_placement_looks_at_everyone() -> None:
    router = cluster(max_explained_workers=MANY)
    router.set_thresholds(Thresholds(cordoned=("w3",)))
    told = router.explain(asked(), (), 0.0)
    assert (len(told.workers), told.left_out) == (MANY, 0)
    assert [terms.verdict for terms in told.workers if terms.verdict] == [Verdict.CORDONED]


def test_policies_that_do_not_go_by_cost_see_everyone() -> None:
    router = cluster(policy=LeastLoadedPolicy())
    for number in range(MANY):
        router.load_report(report(f"w{number}", running=number != 150), 0.0)
    assert place(router, asked()).worker_id == "w150"


def test_replicas_compare_less_and_take_care_that_it_is_not_the_same() -> None:
    router = cluster(40)
    assert router.explain_placed(place(router, asked("alone")).request_id).workers  # type: ignore[union-attr]
    router.set_routers(["a", "b", "c"])
    told = place(router, request("r", prompt_tokens=85, explain=True)).explanation
    assert told is not None
    assert len(told.workers) == 10
    router.set_routers([])
    assert router.routers == 1
