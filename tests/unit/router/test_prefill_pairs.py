"""Which worker computes a prompt for the one that gets the request, and when that one does it itself."""

from random import Random
from typing import Any

import msgspec
import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import BUILT_IN
from kvbus_testkit.routing import chain, g1, report, request, worker_record
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, WorkerLimits

LATER = 1e6
BLOCKS = 100
KEYS = chain(*range(1, BLOCKS + 1))
LONG = BLOCKS * 16 + 4
"""1.6 s of prefill at 1,000 tokens a second."""


def _worker(worker_id: str, role: str, **more: Any) -> InstanceRecord:
    return worker_record(worker_id, **{"role": role, "transfers": ("tcp",), "block_bytes": 64, **more})


def _dispatcher(*records: InstanceRecord, **weights: Any) -> Dispatcher:
    dispatcher = Dispatcher("router", Limits(), Weights(**weights), BUILT_IN["kv"](), Random(3))
    for record in records:
        dispatcher.state.joined(record)
    return dispatcher


def _place(dispatcher: Dispatcher, name: str = "r", tokens: int = LONG, **more: Any) -> Placed:
    matches = more.pop("matches", ())
    asked = request(name, keys=more.pop("keys", KEYS), prompt_tokens=tokens, **more)
    outcome, _ = dispatcher.submit(asked, matches, LATER, more.get("now", 0.0))
    dispatcher.check_integrity()
    assert isinstance(outcome, Placed), outcome
    return outcome


def _prefiller(placed: Placed) -> str:
    return placed.placement.prefill.worker_id if placed.placement.prefill is not None else ""


def test_a_long_prompt_is_computed_by_the_prefill_worker_and_decoded_by_the_other() -> None:
    placed = _place(_dispatcher(_worker("d", "decode"), _worker("p", "prefill")))
    assert placed.placement.worker_id == "d"
    assert placed.placement.prefill is not None
    assert (placed.placement.prefill.worker_id, placed.placement.prefill.tokens) == ("p", 1600)
    assert placed.placement.onboard_tokens == 1600
    assert placed.chosen.uncached_tokens == 4
    assert placed.decision.uncached_tokens == 4
    assert (placed.decision.prefill_worker_id, placed.decision.prefill_tokens) == ("p", 1600)


def test_a_short_rest_is_computed_where_it_is_needed() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    assert _prefiller(_place(dispatcher, tokens=40)) == ""
    assert _prefiller(_place(dispatcher, "r2", matches=[g1("d", BLOCKS - 1)])) == ""


def test_what_counts_as_short_follows_from_the_measured_handover() -> None:
    def prefiller(handover_s: float) -> str:
        dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
        dispatcher.load_report(report("d", handover_s=handover_s, onboard={"remote": 1e5}), 0.0)
        return _prefiller(_place(dispatcher, tokens=404, keys=KEYS[: 25 * 16]))

    assert prefiller(0.001) == "p"
    assert prefiller(0.5) == ""


@pytest.mark.parametrize(
    ("pin", "prefiller"), [("q", "q"), ("both", "both"), ("d", ""), ("d2", ""), ("other-layout", ""), ("nobody", "")]
)
def test_a_client_names_who_computes_its_prompt(pin: str, prefiller: str) -> None:
    dispatcher = _dispatcher(
        _worker("d", "decode"),
        _worker("d2", "decode", slots=1),
        _worker("p", "prefill"),
        _worker("q", "prefill"),
        _worker("both", "both"),
        _worker("other-layout", "prefill", block_bytes=128),
    )
    dispatcher.load_report(report("q", waiting_tokens=50_000), 0.0)
    placed = _place(dispatcher, pinned="d", prefill_pinned=pin)
    assert placed.placement.worker_id == "d"
    assert _prefiller(placed) == prefiller
    assert _prefiller(_place(dispatcher, "r2", pinned="d", keys=chain(*range(1000, 1000 + BLOCKS)))) == "p"


def test_a_slow_way_between_the_two_is_worse_than_computing() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    dispatcher.load_report(report("d", onboard={"remote": 500.0}), 0.0)
    assert _prefiller(_place(dispatcher)) == ""


def test_busy_prefill_workers_leave_the_prompt_to_the_others() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"), _worker("q", "prefill"))
    dispatcher.load_report(report("p", waiting_tokens=5000), 0.0)
    assert _prefiller(_place(dispatcher)) == "q"
    dispatcher.load_report(report("q", waiting_tokens=5000), 0.0)
    assert _prefiller(_place(dispatcher, "r2", keys=chain(*range(1000, 1000 + BLOCKS)))) == ""


def test_prompts_that_were_placed_count_before_and_after_the_report_that_lists_them() -> None:
    dispatcher = _dispatcher(_worker("d", "decode", slots=64), _worker("p", "prefill"), _worker("q", "prefill"))
    others = [chain(*range(1000 * k, 1000 * k + BLOCKS)) for k in range(1, 9)]
    assert [_prefiller(_place(dispatcher, f"a{k}", keys=others[k])) for k in range(2)] == ["p", "q"]
    assert len(dispatcher.state.prefills) == 2
    dispatcher.load_report(report("p", waiting_tokens=1600, prefills=["a0"]), 0.1)
    assert dispatcher.state.prefills.on_top("p") == (0, 0)
    assert dispatcher.state.prefills.on_top("q") == (1, 1600)
    dispatcher.load_report(report("p"), 0.2)
    assert len(dispatcher.state.prefills) == 1
    dispatcher.first_token("a1", 0.3)
    assert len(dispatcher.state.prefills) == 0
    dispatcher.check_integrity()


def test_a_prompt_that_never_arrives_there_is_forgotten() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    _place(dispatcher)
    dispatcher.load_report(report("p"), 1.0)
    assert len(dispatcher.state.prefills) == 1
    dispatcher.load_report(report("p"), 10.0)
    assert len(dispatcher.state.prefills) == 0


def test_a_fan_out_is_computed_by_one() -> None:
    workers = [_worker(f"d{k}", "decode") for k in range(3)] + [_worker(f"p{k}", "prefill") for k in range(3)]
    dispatcher = _dispatcher(*workers)
    placed = [_place(dispatcher, f"r{k}", allowed=(f"d{k}",)) for k in range(3)]
    assert {_prefiller(each) for each in placed} == {"p0"}
    assert [each.decision.prefill_tokens for each in placed] == [1600, 0, 0]


def test_who_comes_to_the_worker_that_awaits_the_prompt_needs_no_other() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    assert [_prefiller(_place(dispatcher, f"r{k}")) for k in range(3)] == ["p", "", ""]


def test_the_end_of_a_request_and_of_a_worker_take_the_prefill_along() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    _place(dispatcher)
    dispatcher.finished("r")
    assert len(dispatcher.state.prefills) == 0
    _place(dispatcher, "r2")
    dispatcher.state.left(_worker("p", "prefill"))
    assert len(dispatcher.state.prefills) == 0
    dispatcher.check_integrity()
    assert _prefiller(_place(dispatcher, "r3")) == ""


def test_a_replica_hears_of_the_pair() -> None:
    mine = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    other = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"), _worker("q", "prefill"))
    decision: Decision = _place(mine).decision
    other.apply_decision(decision, 0.0)
    other.check_integrity()
    assert other.state.prefills.on_top("p") == (1, 1600)
    assert _prefiller(_place(other, "r2", keys=chain(*range(1000, 1000 + BLOCKS)))) == "q"


@pytest.mark.parametrize(
    ("verdict", "record"),
    [
        ("other_layout", _worker("p", "prefill", layout="other")),
        ("other_layout", _worker("p", "prefill", block_bytes=128)),
        ("no_way", _worker("p", "prefill", transfers=("shm",), host="elsewhere")),
        ("draining", _worker("p", "prefill", draining=True)),
    ],
)
def test_a_worker_whose_blocks_are_of_no_use_is_not_asked(verdict: str, record: InstanceRecord) -> None:
    placed = _place(_dispatcher(_worker("d", "decode"), record), explain=True)
    assert _prefiller(placed) == ""
    assert placed.placement.explanation is not None
    assert [terms.verdict for terms in placed.placement.explanation.prefill] == [verdict]


def test_cordoned_excluded_and_full_workers_are_not_asked() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill", slots=1))
    assert _prefiller(_place(dispatcher, excluded=("p",))) == ""
    dispatcher.finished("r")
    assert _prefiller(_place(dispatcher, "r1")) == "p"
    assert _prefiller(_place(dispatcher, "r2", keys=chain(*range(1000, 1000 + BLOCKS)))) == ""
    dispatcher.finished("r1")
    dispatcher.set_thresholds(dispatcher.thresholds.changed(WorkerLimits(cordoned=("p",))))
    assert _prefiller(_place(dispatcher, "r3")) == ""


def test_nobody_computes_for_another_among_workers_that_do_both() -> None:
    assert _prefiller(_place(_dispatcher(_worker("a", "both"), _worker("b", "both")))) == ""


def test_one_that_does_both_computes_for_a_decode_worker_that_is_behind() -> None:
    dispatcher = _dispatcher(_worker("d", "decode", rate=100.0), _worker("b", "both"))
    placed = _place(dispatcher, allowed=("d",))
    assert (placed.placement.worker_id, _prefiller(placed)) == ("d", "b")


def test_the_role_can_change_while_requests_come() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"))
    assert _prefiller(_place(dispatcher)) == "p"
    dispatcher.joined(_worker("p", "decode"), 0.0)
    assert _prefiller(_place(dispatcher, "r2")) == ""
    dispatcher.joined(_worker("d", "prefill"), 0.0)
    placed = _place(dispatcher, "r3", keys=chain(*range(1000, 1000 + BLOCKS)))
    assert (placed.placement.worker_id, _prefiller(placed)) == ("p", "d")


def test_it_can_be_turned_off() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"), remote_prefill=False)
    assert _prefiller(_place(dispatcher)) == ""


def test_the_explanation_names_the_pair() -> None:
    dispatcher = _dispatcher(_worker("d", "decode"), _worker("p", "prefill"), _worker("q", "prefill"))
    asked = request("r", keys=KEYS, prompt_tokens=LONG)
    before = dispatcher.explain(asked, [g1("q", 50)], 0.0)
    assert (before.prefill_worker_id, [t.worker_id for t in before.prefill]) == ("q", ["q", "p"])
    placed = _place(dispatcher, matches=[g1("q", 50)])
    after = dispatcher.explain_placed("r")
    assert after is not None
    assert (after.worker_id, after.prefill_worker_id) == ("d", "q")
    best = after.prefill[0]
    assert (best.tokens, best.cached_tokens) == (1600, 800)
    assert best.cost_s < best.local_cost_s
    assert placed.placement.explanation is None
    chosen = next(terms for terms in after.workers if terms.worker_id == "d")
    assert [part.source for part in chosen.onboard] == ["remote"]
    assert msgspec.structs.asdict(chosen)["uncached_tokens"] == 4


def test_of_many_prefill_workers_the_idle_and_those_that_hold_the_prompt_are_looked_at() -> None:
    workers = [_worker(f"p{k:03}", "prefill") for k in range(100)]
    dispatcher = _dispatcher(_worker("d", "decode"), *workers)
    for k in range(100):
        dispatcher.load_report(report(f"p{k:03}", waiting_tokens=100 * (100 - k)), 0.0)
    placed = _place(dispatcher, matches=[g1("p000", 3)])
    explained = dispatcher.explain_placed("r")
    assert _prefiller(placed) == "p099"
    assert explained is not None
    assert len(explained.prefill) == 16
    far = _place(dispatcher, "r2", keys=chain(*range(1000, 1000 + BLOCKS)), matches=[g1("p080", BLOCKS)])
    assert _prefiller(far) == "p080"
