"""State that clients carry for us."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.sealing import PREFIX, Sealer

SEALER = Sealer(b"key")


@given(st.text())
def test_what_was_sealed_opens_for_its_purpose_only(text: str) -> None:
    sealed = SEALER.seal("reasoning", text)
    assert SEALER.open("reasoning", sealed) == text
    assert SEALER.open("compaction", sealed) is None


def test_another_key_does_not_open_it() -> None:
    assert Sealer(b"other").open("reasoning", SEALER.seal("reasoning", "x")) is None


@given(st.data())
def test_one_changed_byte_closes_it(data: st.DataObject) -> None:
    sealed = SEALER.seal("reasoning", "a long thought")
    blob = bytearray(base64.urlsafe_b64decode(sealed.removeprefix(PREFIX)))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    assert SEALER.open("reasoning", PREFIX + base64.urlsafe_b64encode(blob).decode()) is None


@given(st.text() | st.binary().map(lambda data: PREFIX + base64.urlsafe_b64encode(data).decode()))
def test_anything_else_is_refused_without_an_error(text: str) -> None:
    assert SEALER.open("reasoning", text) is None
    assert SEALER.open("reasoning", PREFIX + text) is None


def test_it_is_smaller_than_long_text() -> None:
    text = "the same words again and again, " * 100
    assert len(SEALER.seal("reasoning", text)) < len(text) / 5
