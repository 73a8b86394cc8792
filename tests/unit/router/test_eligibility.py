from collections.abc import Sequence
from typing import Any

import pytest

from kvbus_router.core.eligibility import Verdict, why_no_room, why_not
from kvbus_router.core.limits import MAX_CORDONED, BadLimits, Limits, Thresholds, changed_limits
from kvbus_router.core.workers import Worker
from kvbus_testkit.routing import report, request, worker_record
from kvbus_wire.router import SetLimits, WorkerLimits


def worker(*, taints: Sequence[str] = (), role: str = "both", draining: bool = False, **load: Any) -> Worker:
    record = worker_record("w1", taints=taints, role=role, draining=draining)
    assert record.worker is not None
    made = Worker(record, record.worker)
    if load:
        made.update(report("w1", **load), 0.0, 5.0)
    return made


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ({}, None),
        ({"excluded": ["w1"]}, Verdict.EXCLUDED),
        ({"pinned": "w2"}, Verdict.NOT_PINNED),
        ({"pinned": "w1"}, None),
        ({"allowed": ["w2", "w3"]}, Verdict.NOT_ALLOWED),
        ({"allowed": ["w1"]}, None),
        ({"allowed": ["w2"], "pinned": "w1"}, Verdict.NOT_ALLOWED),
        ({"required_taints": ("h200", "rack-1")}, None),
        ({"required_taints": ("h200", "rack-2")}, Verdict.TAINT_MISSING),
    ],
)
def test_a_worker_says_why_it_may_not_take_a_request(asked: dict[str, Any], verdict: Verdict | None) -> None:
    assert why_not(worker(taints=["rack-1", "h200"]), request(**asked), Thresholds()) is verdict


def test_a_worker_with_taints_takes_requests_that_ask_for_none() -> None:
    assert why_not(worker(taints=["rack-1"]), request(), Thresholds()) is None


def test_what_a_worker_is_counts_as_well() -> None:
    assert why_not(worker(role="prefill"), request(), Thresholds()) is Verdict.PREFILL_ONLY
    assert why_not(worker(draining=True), request(), Thresholds()) is Verdict.DRAINING
    assert why_not(worker(), request(), Thresholds(cordoned=("w1",))) is Verdict.CORDONED
    assert why_not(worker(), request(pinned="w1"), Thresholds(cordoned=("w1",))) is None, "it can be tried out"
    guess = request(pinned="w1", speculative=True)
    assert why_not(worker(), guess, Thresholds(cordoned=("w1",))) is Verdict.CORDONED, "the real one goes elsewhere"


def test_a_worker_has_room_up_to_its_limit_of_requests() -> None:
    thresholds = Thresholds(max_requests_per_worker=3)
    assert why_no_room(worker(running=2), thresholds) is None
    assert why_no_room(worker(running=3), thresholds) is Verdict.FULL


def test_a_worker_has_room_up_to_its_limit_of_waiting_tokens() -> None:
    thresholds = Thresholds(busy_waiting_tokens=1000)
    assert why_no_room(worker(running=1, waiting_tokens=999), thresholds) is None
    assert why_no_room(worker(running=1, waiting_tokens=1000), thresholds) is Verdict.BUSY_TOKENS
    assert why_no_room(worker(running=1, waiting_tokens=10**9), Thresholds()) is None


def test_a_worker_has_room_up_to_its_share_of_used_blocks() -> None:
    thresholds = Thresholds(busy_used_blocks_share=0.9)
    assert why_no_room(worker(running=1, used_blocks=89), thresholds) is None
    assert why_no_room(worker(running=1, used_blocks=90), thresholds) is Verdict.BUSY_BLOCKS
    assert why_no_room(worker(running=1, used_blocks=100), Thresholds()) is None


def test_no_threshold_locks_out_a_worker_without_requests() -> None:
    thresholds = Thresholds(busy_used_blocks_share=0.01, busy_waiting_tokens=1)
    assert why_no_room(worker(waiting_tokens=10, used_blocks=100), thresholds) is None


def test_changes_come_on_top_of_the_settings() -> None:
    thresholds = Limits(max_requests_per_worker=4, busy_waiting_tokens=100).thresholds
    changed = thresholds.changed(WorkerLimits(busy_waiting_tokens=0, cordoned=("w9",)))
    assert changed == Thresholds(max_requests_per_worker=4, busy_waiting_tokens=0, cordoned=("w9",))
    assert changed.as_limits().cordoned == ("w9",)


def test_a_change_keeps_what_it_does_not_name() -> None:
    stored = WorkerLimits(busy_waiting_tokens=5, worker_limit_factor=2.0)
    asked = SetLimits(limits=WorkerLimits(busy_used_blocks_share=0.5), reset=("worker_limit_factor",))
    assert changed_limits(stored, asked) == WorkerLimits(busy_waiting_tokens=5, busy_used_blocks_share=0.5)


def test_cordons_add_up_and_are_taken_back_one_by_one() -> None:
    first = changed_limits(WorkerLimits(), SetLimits(cordon=("w2", "w1")))
    second = changed_limits(first, SetLimits(cordon=("w3",), uncordon=("w2", "w9")))
    last = changed_limits(second, SetLimits(uncordon=("w1", "w3")))
    assert (first.cordoned, second.cordoned, last) == (("w1", "w2"), ("w1", "w3"), WorkerLimits())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (SetLimits(reset=("nonsense",)), "reset"),
        (SetLimits(limits=WorkerLimits(max_requests_per_worker=-1)), "max_requests_per_worker"),
        (SetLimits(limits=WorkerLimits(worker_limit_factor=0.0)), "worker_limit_factor"),
        (SetLimits(limits=WorkerLimits(worker_limit_factor=float("inf"))), "worker_limit_factor"),
        (SetLimits(limits=WorkerLimits(busy_used_blocks_share=1.01)), "busy_used_blocks_share"),
        (SetLimits(limits=WorkerLimits(busy_used_blocks_share=float("nan"))), "busy_used_blocks_share"),
        (SetLimits(limits=WorkerLimits(busy_waiting_tokens=-5)), "busy_waiting_tokens"),
        (SetLimits(cordon=tuple(map(str, range(MAX_CORDONED + 1)))), "cordoned"),
    ],
)
def test_changes_that_make_no_sense_are_refused(asked: SetLimits, param: str) -> None:
    with pytest.raises(BadLimits) as refused:
        changed_limits(WorkerLimits(), asked)
    assert refused.value.param == param


def test_as_many_workers_as_the_limit_says_can_be_cordoned() -> None:
    everyone = tuple(map(str, range(MAX_CORDONED)))
    assert len(changed_limits(WorkerLimits(), SetLimits(cordon=everyone)).cordoned or ()) == MAX_CORDONED
