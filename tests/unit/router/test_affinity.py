import itertools

import pytest

from kvbus_router.core.affinity import MAX_SESSION_ID_CHARS, Forgotten, Key, Mode, SessionAffinity, session_key


def key(session_id: str, *, tenant: str = "", model: str = "m") -> Key:
    found = session_key(model, tenant, session_id)
    assert found is not None
    return found


def bind(sessions: SessionAffinity, session: Key, worker: str, now: float, ms: int = 0, router: str = "a") -> None:
    sessions.bind(session, worker, decided_ms=ms, router_id=router, now=now)
    sessions.check_integrity()


def test_the_last_worker_of_a_session_is_known() -> None:
    sessions = SessionAffinity(Mode.SOFT, 10, 100.0)
    assert sessions.worker_of(key("s"), 0.0) is None
    bind(sessions, key("s"), "w1", 0.0)
    bind(sessions, key("s"), "w2", 1.0)
    assert sessions.worker_of(key("s"), 2.0) == "w2"
    assert sessions.worker_of(None, 2.0) is None


def test_sessions_of_other_tenants_and_models_are_others() -> None:
    sessions = SessionAffinity(Mode.SOFT, 10, 100.0)
    bind(sessions, key("s", tenant="t"), "w1", 0.0)
    assert sessions.worker_of(key("s"), 0.0) is None
    assert sessions.worker_of(key("s", tenant="t", model="n"), 0.0) is None


def test_off_remembers_nothing() -> None:
    sessions = SessionAffinity(Mode.OFF, 10, 100.0)
    bind(sessions, key("s"), "w1", 0.0)
    assert len(sessions) == 0


def test_a_session_is_forgotten_when_it_was_silent_for_its_time() -> None:
    sessions = SessionAffinity(Mode.SOFT, 10, 100.0)
    bind(sessions, key("s"), "w1", 0.0)
    bind(sessions, key("t"), "w1", 50.0)
    assert sessions.worker_of(key("s"), 99.9) == "w1"
    assert sessions.worker_of(key("s"), 100.0) is None
    assert (len(sessions), sessions.forgotten[Forgotten.EXPIRED]) == (1, 1)


def test_at_the_limit_the_session_that_was_silent_longest_is_forgotten() -> None:
    sessions = SessionAffinity(Mode.SOFT, 2, 100.0)
    for now, session in enumerate(["a", "b", "a", "c"]):
        bind(sessions, key(session), "w1", float(now))
    assert [sessions.worker_of(key(session), 4.0) for session in "abc"] == ["w1", None, "w1"]
    assert sessions.forgotten[Forgotten.LIMIT] == 1


def test_a_final_request_ends_the_memory() -> None:
    sessions = SessionAffinity(Mode.SOFT, 2, 100.0)
    bind(sessions, key("s"), "w1", 0.0)
    sessions.end(key("s"))
    sessions.end(key("s"))
    sessions.end(None)
    assert (len(sessions), sessions.forgotten[Forgotten.FINAL]) == (0, 1)


def test_an_id_at_the_limit_is_remembered_and_a_longer_one_is_not() -> None:
    assert session_key("m", "", "x" * MAX_SESSION_ID_CHARS) is not None
    assert session_key("m", "", "x" * (MAX_SESSION_ID_CHARS + 1)) is None
    assert session_key("m", "", "") is None


@pytest.mark.parametrize("order", list(itertools.permutations([(5, "a", "w1"), (5, "b", "w2"), (4, "c", "w3")])))
def test_replicas_agree_in_whatever_order_they_hear_of_decisions(order: list[tuple[int, str, str]]) -> None:
    sessions = SessionAffinity(Mode.SOFT, 10, 100.0)
    for now, (ms, router, worker) in enumerate(order):
        bind(sessions, key("s"), worker, float(now), ms, router)
    assert sessions.worker_of(key("s"), 3.0) == "w2"
