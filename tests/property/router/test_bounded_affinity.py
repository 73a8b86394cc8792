"""Sessions are bounded: in what they may cost, in how many are remembered, and in how long replicas differ."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvbus_router.core.affinity import Mode, SessionAffinity, session_key
from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_testkit.routing import g1, report, request, worker_record

WORKERS = ("w0", "w1", "w2")
BONUS_S = 0.3

loads = st.lists(st.integers(0, 3000), min_size=3, max_size=3)
depths = st.lists(st.integers(0, 6), min_size=3, max_size=3)


@given(st.sampled_from(WORKERS), loads, depths, st.integers(1, 2000))
def test_a_session_never_costs_more_than_its_bonus(
    bound: str, waiting: list[int], cached: list[int], tokens: int
) -> None:
    limits = Limits(affinity_bonus_s=BONUS_S)
    dispatcher = Dispatcher("router", limits, Weights(), KvPolicy(), Random(1))
    for worker_id in WORKERS:
        dispatcher.state.joined(worker_record(worker_id))
    dispatcher.submit(request("first", session="s", pinned=bound, prompt_tokens=1), (), 1e6, 0.0)
    dispatcher.finished("first")
    for worker_id, waiting_tokens in zip(WORKERS, waiting, strict=True):
        dispatcher.state.load_report(report(worker_id, waiting_tokens=waiting_tokens), 1.0)
    matches = [g1(worker_id, depth) for worker_id, depth in zip(WORKERS, cached, strict=True)]
    asked = request("second", session="s", prompt_tokens=tokens, explain=True)
    outcome, _ = dispatcher.submit(asked, matches, 1e6, 1.0)
    assert isinstance(outcome, Placed)
    told = outcome.placement.explanation
    assert told is not None
    costs_s = {terms.worker_id: terms.cost_s + terms.affinity_s for terms in told.workers}
    assert costs_s[outcome.placement.worker_id] <= min(costs_s.values()) + BONUS_S + 1e-5


placements = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from(WORKERS)),
    max_size=8,
    unique_by=lambda p: p[:2],
)


@given(placements, st.randoms(use_true_random=False))
def test_replicas_agree_on_every_session_once_all_has_been_heard(
    made: list[tuple[int, str, str]], random: Random
) -> None:
    """Decisions are heard in any order."""
    views = []
    for _ in range(2):
        heard = list(made)
        random.shuffle(heard)
        sessions = SessionAffinity(Mode.SOFT, 100, 1e6)
        for now, (ms, router_id, worker_id) in enumerate(heard):
            sessions.bind(session_key("m", "", "s"), worker_id, decided_ms=ms, router_id=router_id, now=float(now))
            sessions.check_integrity()
        views.append(sessions.worker_of(session_key("m", "", "s"), 100.0))
    assert views[0] == views[1]


uses = st.lists(st.tuples(st.integers(0, 9), st.floats(0, 30)), max_size=60)


@given(uses, st.integers(1, 5))
def test_no_more_sessions_are_remembered_than_allowed_and_none_for_longer(
    made: list[tuple[int, float]], most: int
) -> None:
    ttl_s = 40.0
    sessions = SessionAffinity(Mode.SOFT, most, ttl_s)
    now, last_use = 0.0, dict[int, float]()
    for number, pause_s in made:
        now += pause_s
        sessions.bind(session_key("m", "", f"s{number}"), "w", decided_ms=0, router_id="a", now=now)
        last_use[number] = now
        sessions.check_integrity()
        assert len(sessions) <= most
    fresh = sorted((at, number) for number, at in last_use.items() if now - at < ttl_s)[-most:]
    known = {number for number in range(10) if sessions.worker_of(session_key("m", "", f"s{number}"), now)}
    assert len(known) == len(fresh)
    assert all(now - last_use[number] < ttl_s for number in known)
