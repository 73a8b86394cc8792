"""A fan-out: who may wait for the worker that computes its prefix, and who is better off elsewhere."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import BUILT_IN
from kvbus_testkit.routing import chain, report, request, worker_record
from kvbus_wire.indexer import Match
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import AgentHints
from kvbus_wire.router import RouteRequest

LATER = 1e6
BLOCKS = 500
PREFIX = chain(*range(1, BLOCKS + 1))
PROMPT = BLOCKS * 16 + 10
"""Eight seconds of prefill at 1,000 tokens a second."""


def _dispatcher(*workers: str, policy: str = "kv", **limits: Any) -> Dispatcher:
    dispatcher = Dispatcher(
        "router",
        Limits(max_requests_per_worker=1, **limits),
        Weights(),
        BUILT_IN[policy](),
        Random(3),
    )
    for worker in workers:
        dispatcher.state.joined(worker_record(worker, slots=1))
    return dispatcher


def _ask(name: str, *, osl: int = 10, **more: Any) -> RouteRequest:
    asked = request(name, keys=PREFIX, prompt_tokens=PROMPT, **more)
    return msgspec.structs.replace(asked, hints=AgentHints(osl=osl), max_tokens=10_000)


def _submit(dispatcher: Dispatcher, ask: RouteRequest, now: float = 0.0, matches: Sequence[Match] = ()) -> str | None:
    """Who got it; None: it waits."""
    outcome, settled = dispatcher.submit(ask, matches, LATER, now)
    assert not settled
    dispatcher.check_integrity()
    if isinstance(outcome, Queued):
        return None
    assert isinstance(outcome, Placed), outcome
    return outcome.placement.worker_id


def _pump(dispatcher: Dispatcher, now: float) -> dict[str, str]:
    settled = dispatcher.pump(now)
    dispatcher.check_integrity()
    return {s.request_id: s.outcome.placement.worker_id for s in settled if isinstance(s.outcome, Placed)}


def test_a_request_waits_for_the_full_worker_that_computes_its_prefix_when_that_is_faster() -> None:
    dispatcher = _dispatcher("w1", "w2")
    leader = _submit(dispatcher, _ask("leader"))
    assert leader is not None
    assert _submit(dispatcher, _ask("follower"), now=1.0) is None
    assert dispatcher.prefix_waits == 1
    dispatcher.finished("leader")
    # The prefix has no first token: nothing can be said of it any more, so the nearest worker will do.
    assert "follower" in _pump(dispatcher, 2.0)


def test_once_the_prefix_is_there_and_a_slot_is_free_the_follower_computes_its_own_part_only() -> None:
    dispatcher = _dispatcher("w1", "w2")
    leader = _submit(dispatcher, _ask("leader"))
    assert _submit(dispatcher, _ask("follower"), now=1.0) is None
    dispatcher.first_token("leader", 8.0)
    assert _pump(dispatcher, 8.0) == {}
    # Longer than the grace of the prefix: that the leader computed it is not forgotten while somebody waits for it.
    dispatcher.finished("leader")
    (settled,) = dispatcher.pump(9.9)
    assert isinstance(settled.outcome, Placed)
    assert settled.outcome.placement.worker_id == leader
    assert settled.outcome.chosen.uncached_tokens == PROMPT - BLOCKS * 16


def test_a_request_does_not_wait_when_the_slot_is_taken_for_longer_than_computing_takes() -> None:
    dispatcher = _dispatcher("w1", "w2")
    leader = _submit(dispatcher, _ask("leader", osl=5000))
    assert leader is not None
    other = _submit(dispatcher, _ask("follower"))
    assert other not in (None, leader)
    assert dispatcher.prefix_waits == 0


def test_output_that_is_said_makes_waiting_worth_while() -> None:
    """What is left of the leader decides, not what it began with."""
    dispatcher = _dispatcher("w1", "w2")
    leader = _submit(dispatcher, _ask("leader", osl=5000))
    assert leader is not None
    dispatcher.first_token("leader", 8.0)
    told = report(leader, running=1, ids=["leader"])
    dispatcher.state.load_report(msgspec.structs.replace(told, output_tokens=pack_tokens([4990])), 8.5)
    assert _submit(dispatcher, _ask("follower"), now=9.0) is None


def test_who_would_be_far_behind_in_the_line_computes_for_itself() -> None:
    dispatcher = _dispatcher("w1", "w2")
    assert _submit(dispatcher, _ask("leader")) is not None
    waited = 0
    while _submit(dispatcher, _ask(f"follower{waited}", osl=80)) is None:
        waited += 1
        assert waited < 20
    # Waiting for the leader takes 8.1 s, and 0.8 s more for each that waits already; computing takes 8 s, and costs others 2.
    assert waited == 3


def test_the_wait_for_a_prefix_is_bounded() -> None:
    dispatcher = _dispatcher("w1", "w2", follow_wait_s=3.0)
    leader = _submit(dispatcher, _ask("leader"))
    assert _submit(dispatcher, _ask("follower"), now=1.0) is None
    assert dispatcher.next_due() == 4.0
    assert _pump(dispatcher, 3.9) == {}
    placed = _pump(dispatcher, 4.0)
    assert placed == {"follower": "w2" if leader == "w1" else "w1"}


def test_nobody_waits_for_a_prefix_when_that_is_switched_off_or_the_policy_knows_no_costs() -> None:
    for dispatcher in (_dispatcher("w1", "w2", follow_wait_s=0.0), _dispatcher("w1", "w2", policy="least-loaded")):
        assert _submit(dispatcher, _ask("leader")) is not None
        assert _submit(dispatcher, _ask("follower")) is not None


def test_with_a_full_queue_nobody_waits_of_its_own_accord() -> None:
    dispatcher = _dispatcher("w1", "w2", max_queued=1)
    assert _submit(dispatcher, _ask("leader")) is not None
    assert _submit(dispatcher, _ask("follower0")) is None
    assert _submit(dispatcher, _ask("follower1")) is not None


def test_what_waits_because_all_are_full_remembers_who_computed_its_prefix() -> None:
    dispatcher = _dispatcher("w1", "w2", inflight_grace_s=0.5)
    leader = _submit(dispatcher, _ask("leader"))
    other = _submit(dispatcher, request("other", keys=chain(999), prompt_tokens=20))
    assert None not in (leader, other)
    assert _submit(dispatcher, _ask("follower"), now=1.0) is None
    dispatcher.first_token("leader", 8.0)
    dispatcher.first_token("other", 8.0)
    dispatcher.finished("other")
    dispatcher.finished("leader")
    (settled,) = dispatcher.pump(30.0)
    assert isinstance(settled.outcome, Placed)
    assert settled.outcome.placement.worker_id == leader


def test_a_speculative_request_never_waits() -> None:
    dispatcher = _dispatcher("w1", "w2")
    assert _submit(dispatcher, _ask("leader")) is not None
    assert _submit(dispatcher, _ask("guess", speculative=True)) is not None
    outcome, _ = dispatcher.submit(_ask("another", speculative=True), (), LATER, 0.0)
    assert isinstance(outcome, Refused)
    assert dispatcher.waiting == 0


def test_a_speculative_request_takes_no_room_while_others_wait() -> None:
    dispatcher = _dispatcher("w1", "w2")
    assert _submit(dispatcher, _ask("leader")) is not None
    assert _submit(dispatcher, _ask("follower")) is None
    outcome, _ = dispatcher.submit(request("guess", prompt_tokens=10, speculative=True), (), LATER, 0.0)
    assert isinstance(outcome, Refused)
    assert outcome.reply.retry_after_s is not None


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fan_out_goes_to_the_one_worker_while_it_has_slots(workers: int) -> None:
    dispatcher = Dispatcher("router", Limits(), Weights(), BUILT_IN["kv"](), Random(3))
    for number in range(workers):
        dispatcher.state.joined(worker_record(f"w{number}", slots=8))
    placed = {_submit(dispatcher, _ask(f"agent{n}")) for n in range(8)}
    assert len(placed) == 1
    assert None not in placed
