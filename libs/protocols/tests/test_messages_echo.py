"""Strings that clients keep and send back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_protocols.messages_echo import call_id_of, sign_thought, signed_thought, tool_use_id


@given(st.text())
def test_a_signature_holds_its_thought(thought: str) -> None:
    signature = sign_thought(thought)
    assert signature
    assert signed_thought(signature) == thought.encode(errors="replace").decode()


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_an_id_holds_the_models_own_and_has_only_the_characters_that_clients_allow(call_id: str) -> None:
    theirs = tool_use_id(call_id)
    assert re.fullmatch(r"toolu_[A-Za-z0-9_-]*", theirs) or call_id.startswith("toolu_")
    assert call_id_of(theirs) == (call_id or theirs)


def test_an_id_that_a_client_has_stripped_to_letters_and_digits_still_holds_the_models_own() -> None:
    assert call_id_of(tool_use_id("call_0123456789abcdef01234567").replace("_", "")) == "call_0123456789abcdef01234567"


def test_equal_ids_of_different_answers_become_different_ones() -> None:
    assert tool_use_id("functions.f:0") != tool_use_id("functions.f:0")


@given(st.text())
def test_any_string_is_taken_for_a_signature_or_an_id_and_nothing_fails(text: str) -> None:
    signed_thought(text)
    assert isinstance(call_id_of(text), str)


@pytest.mark.parametrize("signature", [None, "", "c2ln", "erased", "a3ZidXMxAAAA", "EqQBCkYIAxgCKkA=", "é"])
def test_a_signature_of_somebody_else_holds_nothing(signature: str | None) -> None:
    assert signed_thought(signature) is None


def test_a_cut_signature_gives_what_is_left_of_the_thought() -> None:
    whole = sign_thought("because " * 500)
    assert (signed_thought(whole[: len(whole) // 2]) or "") in "because " * 500


@pytest.mark.parametrize("theirs", ["toolu_7", "toolu_0123456789abcdef_", "toolu_0123456789abcdef_/w", "call_1", ""])
def test_an_id_of_somebody_else_stays_as_it_is(theirs: str) -> None:
    assert call_id_of(theirs) == theirs
