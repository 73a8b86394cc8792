from typing import Any

import pytest

from kvbus_frontend.core.session_tools import ENTRY_BYTES, SessionKey, SessionTools


def key(session: str = "s", *, tenant: str = "", model: str = "m") -> SessionKey:
    return SessionKey(tenant, model, session)


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name} for name in names]


def test_the_newest_tools_of_a_session_are_found_in_their_order() -> None:
    kept = SessionTools(10_000)
    kept.note(key(), tools("a"))
    kept.note(key(), [{"type": "function", "name": "b", "parameters": {"z": 1, "a": 2}}])
    assert kept.find(key()) == [{"type": "function", "name": "b", "parameters": {"z": 1, "a": 2}}]
    assert list(kept.find(key())[0]["parameters"]) == ["z", "a"]  # type: ignore[index]  # found
    assert len(kept) == 1
    kept.check_integrity()


@pytest.mark.parametrize("other", [key("t"), key(tenant="t"), key(model="n"), SessionKey("s", "", "m")])
def test_sessions_models_and_tenants_are_kept_apart(other: SessionKey) -> None:
    kept = SessionTools(10_000)
    kept.note(key(), tools("a"))
    assert kept.find(other) is None


def test_at_the_limit_what_was_used_least_recently_goes() -> None:
    kept = SessionTools(2 * (ENTRY_BYTES + 50))
    for session in ("1", "2"):
        kept.note(key(session), tools("a"))
    assert kept.find(key("1")) is not None
    kept.note(key("3"), tools("a"))
    assert [kept.find(key(session)) is not None for session in "123"] == [True, False, True]
    kept.check_integrity()


def test_tools_that_do_not_fit_at_all_leave_nothing_behind() -> None:
    kept = SessionTools(ENTRY_BYTES + 100)
    kept.note(key(), tools("a"))
    kept.note(key(), tools("a" * 200))
    assert (kept.find(key()), len(kept), kept.size_bytes) == (None, 0, 0)
    nothing = SessionTools(0)
    nothing.note(key(), tools("a"))
    assert nothing.find(key()) is None


def test_long_names_in_wide_characters_count_as_what_they_take() -> None:
    kept = SessionTools(100_000)
    for i in range(10):
        kept.note(SessionKey("", "\U0001f30a" * 10_000, f"{i}"), [])
    assert len(kept) == 2
    kept.check_integrity()
