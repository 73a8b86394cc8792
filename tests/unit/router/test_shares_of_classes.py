"""What policy classes and tenants may have placed and waiting, and what those are told that may not."""

from random import Random
from typing import Any

import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.news import Heard
from kvbus_router.core.policies import BUILT_IN
from kvbus_router.core.policy_classes import PolicyClasses, read_classes
from kvbus_testkit.routing import MODEL, g1, report, request, worker_record
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.indexer import Match
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.router import Decision, RouteRequest

LATER = 1e6


def _classes(text: str) -> PolicyClasses:
    return read_classes(text.encode())


class _Router:
    """One worker with ``slots`` places."""

    def __init__(self, classes: str = "", *, slots: int = 4) -> None:
        limits = Limits(max_requests_per_worker=slots)
        self.dispatcher = Dispatcher(
            "router", limits, Weights(), BUILT_IN["kv"](), Random(1), classes=_classes(classes)
        )
        self.dispatcher.state.joined(worker_record("w", slots=slots))

    def submit(
        self, ask: RouteRequest, now: float = 0.0, matches: tuple[Match, ...] = ()
    ) -> Placed | Queued | ErrorReply:
        outcome, settled = self.dispatcher.submit(ask, matches, LATER, now)
        self.dispatcher.check_integrity()
        assert not settled
        return outcome.reply if isinstance(outcome, Refused) else outcome

    def ask(self, name: str, tenant: str = "", **more: Any) -> str:
        """placed, queued, or the code of the refusal."""
        outcome = self.submit(request(name, tenant=tenant, **more))
        match outcome:
            case Placed():
                return "placed"
            case Queued():
                return "queued"
            case _:
                assert outcome.retryable
                assert outcome.retry_after_s is not None
                return outcome.code

    def served(self, now: float = 0.0) -> list[str]:
        settled = self.dispatcher.pump(now)
        self.dispatcher.check_integrity()
        return [one.request_id for one in settled if isinstance(one.outcome, Placed)]

    def finish(self, name: str, now: float = 0.0) -> list[str]:
        self.dispatcher.finished(name)
        return self.served(now)


BATCH = """
[[class]]
name = "batch"
tenants = ["batch*"]
"""


def test_a_class_has_no_more_requests_placed_than_it_may_though_there_is_room() -> None:
    router = _Router(BATCH + "max_running = 1")
    assert [router.ask(name, "batch") for name in "ab"] == ["placed", "queued"]
    assert router.ask("person", "alice") == "placed"
    assert router.served() == []
    assert router.finish("person") == []
    assert router.finish("a") == ["b"]


def test_a_tenant_has_no_more_requests_placed_than_its_class_allows_each() -> None:
    router = _Router(BATCH + "max_running_per_tenant = 1")
    assert [router.ask(name, "batch-1") for name in "ab"] == ["placed", "queued"]
    assert router.ask("c", "batch-2") == "placed"
    assert router.finish("a") == ["b"]


def test_places_of_a_class_come_back_however_its_requests_end() -> None:
    router = _Router(BATCH + "max_running = 1")
    assert [router.ask(name, "batch") for name in "abcd"] == ["placed", "queued", "queued", "queued"]
    router.dispatcher.state.load_report(report("w", ids=["a"], running=1), 1.0)
    router.dispatcher.state.load_report(report("w"), 2.0)
    assert router.served() == ["b"]
    router.dispatcher.state.left(worker_record("w"))
    router.dispatcher.state.joined(worker_record("w", incarnation=2))
    assert router.served() == ["c"]


def test_placements_of_replicas_count_in_the_class() -> None:
    router = _Router(BATCH + "max_running = 1")
    decision = Decision(
        router_id="replica",
        request_id="theirs",
        model=MODEL,
        worker_id="w",
        incarnation=1,
        prompt_tokens=10,
        uncached_tokens=10,
        expected_output=5,
        tenant="batch",
        policy_class="batch",
    )
    assert router.dispatcher.apply_decision(decision, 0.0) == (Heard.APPLIED, [])
    assert router.ask("ours", "batch") == "queued"
    assert router.finish("theirs") == ["ours"]


def test_a_placement_says_in_whose_share_it_runs() -> None:
    router = _Router(BATCH)
    asked = request("r", tenant="batch-9", explain=True)
    outcome = router.submit(asked)
    assert isinstance(outcome, Placed)
    for told in (
        outcome.decision,
        outcome.placement.explanation,
        router.dispatcher.explain_placed("r"),
        router.dispatcher.explain(asked, (), 0.0),
    ):
        assert told is not None
        assert (told.policy_class, told.tenant) == ("batch", "batch-9")


def test_a_tenant_with_too_many_waiting_is_told_that_it_is_the_one() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_waiting_per_tenant = 2")
    told = [router.ask(name, "batch-1") for name in "abcd"]
    assert told == ["placed", "queued", "queued", ErrorCode.RATE_LIMITED]
    assert router.ask("e", "batch-2") == "queued"
    assert router.finish("a") == ["b"]
    assert router.ask("f", "batch-1") == "queued"


def test_a_class_with_too_many_waiting_is_overloaded() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_waiting = 1")
    assert [router.ask(name, f"batch-{name}") for name in "abc"] == ["placed", "queued", ErrorCode.OVERLOADED]
    assert router.ask("person", "alice") == "placed"


def test_tokens_that_wait_in_a_class_are_limited_but_one_request_of_any_size_may_wait() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_waiting_tokens = 100")
    assert router.ask("a", "batch") == "placed"
    assert router.ask("large", "batch", prompt_tokens=1000) == "queued"
    assert router.ask("small", "batch", prompt_tokens=1) == ErrorCode.OVERLOADED
    assert router.finish("large") == []
    assert router.ask("half", "batch", prompt_tokens=50) == "queued"
    assert router.ask("other half", "batch", prompt_tokens=50) == "queued"
    assert router.ask("too much", "batch", prompt_tokens=1) == ErrorCode.OVERLOADED


def test_who_waits_longer_than_the_class_allows_is_told_to_come_back() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_wait_s = 5")
    assert [router.ask(name, "batch") for name in "ab"] == ["placed", "queued"]
    assert router.dispatcher.next_due() == 5.0
    assert router.dispatcher.pump(4.9) == []
    (settled,) = router.dispatcher.pump(5.0)
    assert isinstance(settled.outcome, Refused)
    assert settled.outcome.reply.code is ErrorCode.OVERLOADED
    assert settled.outcome.reply.retry_after_s is not None


def test_the_retry_after_grows_with_those_ahead_and_the_pace_at_which_they_leave() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_waiting_per_tenant = 5")
    for number in range(6):
        router.ask(f"b{number}", "batch")
    refused = router.submit(request("early", tenant="batch"))
    assert isinstance(refused, ErrorReply)
    assert refused.retry_after_s == 1.0
    for turn in range(5):
        assert router.finish(f"b{turn}", 10.0 * turn) == [f"b{turn + 1}"]
    for number in range(5):
        router.ask(f"c{number}", "batch")
    late = router.submit(request("late", tenant="batch"), 50.0)
    assert isinstance(late, ErrorReply)
    assert late.retry_after_s == pytest.approx(5 * 10 * (1 - 0.9**4))


def test_a_pause_in_which_nobody_waits_is_not_the_pace_of_the_queue() -> None:
    router = _Router(BATCH + "max_running = 1\nmax_waiting_per_tenant = 1")
    for day in range(2):
        assert [router.ask(f"{name}{day}", "batch") for name in "ab"] == ["placed", "queued"]
        assert router.finish(f"a{day}", 86_400.0 * day) == [f"b{day}"]
        router.finish(f"b{day}", 86_400.0 * day)
    assert [router.ask(name, "batch") for name in "cd"] == ["placed", "queued"]
    refused = router.submit(request("e", tenant="batch"), 86_401.0)
    assert isinstance(refused, ErrorReply)
    assert refused.retry_after_s == 1.0


def test_a_changed_file_counts_for_those_who_wait_already() -> None:
    router = _Router(BATCH + "max_running = 1")
    assert [router.ask(name, "batch") for name in "abc"] == ["placed", "queued", "queued"]
    router.dispatcher.set_classes(_classes(BATCH + "max_running = 2"))
    assert router.served() == ["b"]
    router.dispatcher.set_classes(PolicyClasses())
    assert router.served() == ["c"]


def test_tenants_take_turns_when_a_worker_has_room_again() -> None:
    router = _Router(slots=1)
    assert router.ask("first", "hog", prompt_tokens=5000) == "placed"
    for number in range(4):
        router.ask(f"hog{number}", "hog", prompt_tokens=5000)
    router.ask("guest", "guest", prompt_tokens=5000)
    assert router.finish("first") == ["hog0"]
    assert router.finish("hog0") == ["guest"]
    assert router.finish("guest") == ["hog1"]


def test_a_class_gives_its_requests_more_turns_and_a_lead() -> None:
    classes = """
        [[class]]
        name = "people"
        input = "user"
        priority = 5
        weight = 3

        [[class]]
        name = "tools"
        input = "tool"
        max_strict_priority = 0
    """
    router = _Router(classes, slots=1)
    assert router.ask("first") == "placed"
    for name, hints in (
        ("tool", AgentHints(input_trigger="tool", strict_priority=9)),
        ("person", AgentHints(input_trigger="user")),
        ("sub-agent", AgentHints()),
    ):
        asked = request(name, session="s")
        fields = {field: getattr(asked, field) for field in asked.__struct_fields__}
        fields |= {"hints": hints, "session": SessionRef(id="s", parent="p")}
        assert isinstance(router.submit(RouteRequest(**fields)), Queued)
    items = {item.id: item for item in router.dispatcher.room.items()}
    assert {name: item.policy_class.name for name, item in items.items()} == {
        "tool": "tools",
        "person": "people",
        "sub-agent": "default",
    }
    # The tier that the request asked for is cut to what its class allows, so it does not go first.
    assert [waiting.strict for waiting in router.dispatcher.room.queue(MODEL).in_order(0.0)] == [0, 0, 0]  # type: ignore[union-attr]


def test_a_request_is_classed_by_what_has_to_be_computed_wherever_it_runs() -> None:
    router = _Router('[[class]]\nname = "large"\nmin_uncached_tokens = 60')
    small = router.submit(request("cached", prompt_tokens=100, keys=bytes(16) * 6), matches=(g1("w", 5),))
    large = router.submit(request("fresh", prompt_tokens=100))
    assert isinstance(small, Placed)
    assert isinstance(large, Placed)
    assert (small.decision.policy_class, large.decision.policy_class) == ("default", "large")
