"""Policies of third parties that raise, or choose a worker that nobody offered."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus_router.adapters.policies import PolicyFailures
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import Outcome, PolicyFailed
from kvbus_router.core.waiting import Item
from kvbus_runtime.log import REPEAT_S
from kvbus_runtime.metrics import Metrics
from kvbus_testkit.routing import request, worker_record
from kvbus_wire.errors import ErrorCode

LATER = 1e6


class Faulty:
    """``wrong``: what it does with the workers on offer."""

    name = "faulty"

    def __init__(self, wrong: Callable[[list[Any]], Any]) -> None:
        self._wrong = wrong

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        chosen: Estimate = self._wrong(estimates)  # type: ignore[arg-type]
        return chosen

    def observe(self, outcome: Outcome) -> None:
        raise RuntimeError("what is that?")


def raises(estimates: list[Any]) -> Any:
    raise ZeroDivisionError


def nothing(estimates: list[Any]) -> Any:
    return None


def somebody_else(estimates: list[Any]) -> Any:
    return msgspec.structs.replace(estimates[0], worker_id="w3")


def empties(estimates: list[Any]) -> Any:
    estimates.clear()
    return None


def router(wrong: Callable[[list[Any]], Any], failures: list[PolicyFailed], **limits: Any) -> Dispatcher:
    made = Dispatcher("router-a", Limits(**limits), Weights(), Faulty(wrong), Random(7), policy_failed=failures.append)
    for name in ("w1", "w2", "w3"):
        made.state.joined(worker_record(name))
    return made


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(raises, "choose"), (nothing, "choose"), (empties, "choose"), (somebody_else, "not_eligible")],
)
def test_the_default_policy_chooses_in_place_of_one_that_cannot(wrong: Any, kind: str) -> None:
    failures: list[PolicyFailed] = []
    made = router(wrong, failures)
    outcome, _ = made.submit(request("r", allowed=["w1", "w2"]), (), LATER, 0.0)
    assert isinstance(outcome, Placed)
    assert outcome.placement.worker_id in {"w1", "w2"}
    assert outcome.placement.policy == "kv", "that is what chose"
    explained = made.explain_placed("r")
    assert explained is not None
    assert (explained.policy, explained.worker_id) == ("kv", outcome.placement.worker_id)
    assert {terms.worker_id for terms in explained.workers} == {"w1", "w2", "w3"}
    assert [failure.kind for failure in failures] == [kind]
    made.check_integrity()


def test_a_request_that_waited_is_not_lost_either() -> None:
    failures: list[PolicyFailed] = []
    made = router(raises, failures, max_requests_per_worker=1)
    for number in range(4):
        outcome, _ = made.submit(request(f"r{number}"), (), LATER, 0.0)
    assert isinstance(outcome, Queued)
    made.finished("r0")
    (settled,) = made.pump(1.0)
    assert isinstance(settled.outcome, Placed)
    made.check_integrity()


def test_a_policy_that_cannot_learn_from_an_outcome_loses_only_that() -> None:
    failures: list[PolicyFailed] = []
    made = router(lambda estimates: estimates[0], failures)
    outcome, _ = made.submit(request("r"), (), LATER, 0.0)
    assert isinstance(outcome, Placed)
    assert outcome.placement.policy == "faulty"
    assert made.first_token("r", 0.5) is not None
    assert [failure.kind for failure in failures] == ["observe"]


def test_a_request_that_cannot_be_placed_costs_no_other_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in the router itself."""
    made = router(lambda estimates: estimates[0], [], max_requests_per_worker=1)
    for number in range(6):
        made.submit(request(f"r{number}"), (), LATER, 0.0)
    place = made._placer.place

    def poisoned(item: Item, now: float) -> Placed | None:
        if item.id in ("r4", "r6"):
            raise OverflowError(item.id)
        return place(item, now)

    monkeypatch.setattr(made._placer, "place", poisoned)
    for number in range(3):
        made.finished(f"r{number}")
    settled = {one.request_id: one.outcome for one in made.pump(1.0)}
    assert isinstance(settled.pop("r4"), Refused)
    assert {name for name, outcome in settled.items() if isinstance(outcome, Placed)} == {"r3", "r5"}
    refused, _ = made.submit(request("r6"), (), LATER, 1.0)
    assert isinstance(refused, Refused)
    assert (refused.reply.code, repr(refused.cause)) == (ErrorCode.INTERNAL, "OverflowError('r6')")
    made.check_integrity()


def test_a_simulation_is_told_and_not_given_the_choices_of_another_policy() -> None:
    made = Dispatcher("replay", Limits(), Weights(), Faulty(raises), Random(7))
    made.state.joined(worker_record("w1"))
    with pytest.raises(PolicyFailed, match="faulty: choose: ZeroDivisionError"):
        made.submit(request("r"), (), LATER, 0.0)


def test_all_failures_are_counted_and_one_a_minute_is_logged() -> None:
    class Log:
        lines: list[dict[str, Any]] = []

        def error(self, event: str, **fields: Any) -> None:
            self.lines.append(fields)

    now, metrics, log = [0.0], Metrics("router"), Log()
    told = PolicyFailures(lambda: now[0], metrics, log)
    for at in (0.0, 1.0, REPEAT_S - 0.1, REPEAT_S):
        now[0] = at
        told(PolicyFailed("faulty", "choose", "ZeroDivisionError()"))
    assert metrics.value("policy_failures_total", {"kind": "choose"}) == 4
    assert [line["held_back"] for line in log.lines] == [0, 2]
