"""What `kvbus doctor` says of limits and cordons."""

import msgspec

from kvbus_cli.asking import Reply
from kvbus_cli.doctor.checks import Facts, Finding, Level, findings
from kvbus_testkit.index_events import a_worker
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import RouterLimits, WorkerLimits


def limits(router_id: str, revision: int = 0, **changed: object) -> Reply:
    stored = WorkerLimits(**changed)  # type: ignore[arg-type]
    return Reply(router_id, RouterLimits(router_id=router_id, revision=revision, in_force=stored, stored=stored))


def look(*routers: Reply, workers: list[InstanceRecord] | None = None) -> list[Finding]:
    """What is said of limits, cordons and the model, and is not fine; for the workers w1 and w2."""
    records = [a_worker("w1"), a_worker("w2")] if workers is None else workers
    told = findings(Facts(server="s", instances=records, stream=None, indexers=[], routers=list(routers)))
    about = {"limits", "cordons", "model", *(router.instance_id for router in routers)}
    return [finding for finding in told if finding.about in about and finding.level is not Level.OK]


def test_routers_that_go_by_their_settings_are_fine() -> None:
    assert look(limits("r1"), limits("r2")) == []


def test_what_was_changed_at_run_time_is_named() -> None:
    (found,) = look(limits("r1", 2, busy_waiting_tokens=500), limits("r2", 2, busy_waiting_tokens=500))
    assert (found.level, found.about) == (Level.NOTE, "limits")
    assert "busy_waiting_tokens" in found.text


def test_routers_that_disagree_are_named_with_what_they_have() -> None:
    (found,) = look(limits("r1", 2, busy_waiting_tokens=500), limits("r2", 1))
    assert (found.level, found.about) == (Level.WARNING, "limits")
    assert "r1 has revision 2, r2 has revision 1" in found.text
    assert look(limits("r1", busy_waiting_tokens=1), limits("r2"))[0].level is Level.WARNING, "settings that differ"


def test_a_router_that_does_not_answer_is_a_problem() -> None:
    assert Finding(Level.PROBLEM, "r1", "does not answer: late") in look(Reply("r1", problem="late"))


def test_a_cordoned_worker_is_noted_and_one_that_is_not_there_too() -> None:
    found = look(limits("r1", 1, cordoned=("w1", "typo")))
    assert [(f.level, f.text) for f in found if f.about == "cordons"] == [
        (Level.NOTE, "get no new requests: w1"),
        (Level.NOTE, "are not there: typo"),
    ]
    assert all(f.about != "model" for f in found)


def test_a_model_whose_workers_all_take_nothing_is_a_problem() -> None:
    cordoned = limits("r1", 1, cordoned=("w1", "w2"))
    (problem,) = [f for f in look(cordoned) if f.level is Level.PROBLEM]
    assert "no request is placed" in problem.text
    leaving = [a_worker("w1"), msgspec.structs.replace(a_worker("w2"), draining=True)]
    assert any(f.level is Level.PROBLEM for f in look(limits("r1", 1, cordoned=("w1",)), workers=leaving))
