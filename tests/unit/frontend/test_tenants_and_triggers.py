from hashlib import sha256

import pytest

from kvbus_frontend.core.tenants import key_name, tenant_of
from kvbus_frontend.core.triggers import input_trigger
from kvbus_protocols.conversation import TextPart, ToolResultPart, Turn

SYSTEM = Turn("system", (TextPart("be brief"),))
USER = Turn("user", (TextPart("hello"),))
SAID = Turn("assistant", (TextPart("hi"),))
RESULT = Turn("tool", (ToolResultPart("call-1", (TextPart("42"),)),))


@pytest.mark.parametrize(
    ("source", "salt", "client", "tenant"),
    [
        ("auto", "acme", "key-1", "acme"),
        ("auto", "", "key-1", "key-1"),
        ("auto", "", "", ""),
        ("salt", "acme", "key-1", "acme"),
        ("salt", "", "key-1", ""),
        ("key", "acme", "key-1", "key-1"),
        ("key", "acme", "", ""),
    ],
)
def test_a_request_counts_for_what_the_setting_says(source: str, salt: str, client: str, tenant: str) -> None:
    assert tenant_of(salt, client, source) == tenant


def test_a_key_is_named_without_being_told() -> None:
    assert key_name(b"sk-secret") == "key-" + sha256(b"sk-secret").hexdigest()[:12]


@pytest.mark.parametrize(
    ("turns", "trigger"),
    [
        ((SYSTEM, USER), "user"),
        ((USER, SAID, USER), "user"),
        ((USER, SAID, RESULT), "tool"),
        ((USER, SAID, RESULT, RESULT, USER), "tool"),
        ((USER, SAID, RESULT, SAID, USER, SYSTEM), "user"),
        ((USER, SAID), ""),
        ((SYSTEM,), ""),
        ((), ""),
    ],
)
def test_what_came_after_the_model_spoke_tells_what_it_answers(turns: tuple[Turn, ...], trigger: str) -> None:
    assert input_trigger(turns) == trigger
