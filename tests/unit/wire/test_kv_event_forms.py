import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored, decode_events, encode_events
from kvbus_wire.message import CONTENT_TYPE, CONTENT_TYPE_JSON, DecodeFailed

key = st.binary(min_size=16, max_size=16)
keys = st.lists(key, max_size=4).map(b"".join)
event: st.SearchStrategy[KvEvent] = st.one_of(
    st.builds(Stored, st.one_of(st.just(b""), key), keys), st.builds(Removed, keys), st.builds(Cleared)
)
batch = st.builds(
    KvEvents,
    instance_id=st.text(min_size=1, max_size=8),
    incarnation=st.integers(0, 2**53),
    model=st.text(min_size=1, max_size=8),
    first_seq=st.integers(1, 2**53),
    events=st.lists(event, max_size=5).map(tuple),
    tier=st.sampled_from(["g1", "g2", "g3", "g4"]),
    block_size=st.integers(1, 256),
    at_ms=st.integers(0, 2**53),
)


@given(batch)
def test_both_forms_say_the_same(events: KvEvents) -> None:
    assert decode_events(encode_events(events), CONTENT_TYPE) == events
    assert decode_events(encode_events(events, as_json=True), CONTENT_TYPE_JSON) == events


def test_the_readable_form_shows_keys_in_hexadecimal() -> None:
    one = KvEvents(instance_id="w", incarnation=1, model="m", first_seq=3, events=(Stored(b"", bytes(range(16))),))
    plain = msgspec.json.decode(encode_events(one, as_json=True))
    assert plain["events"] == [{"kind": "stored", "parent": "", "keys": ["000102030405060708090a0b0c0d0e0f"]}]


def test_the_last_number_follows_from_the_first() -> None:
    three = KvEvents(instance_id="w", incarnation=1, model="m", first_seq=3, events=(Cleared(),) * 3)
    assert three.last_seq == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"instance_id":"w","incarnation":1,"model":"m","first_seq":1,"events":[{"kind":"exploded"}]}',
        '{"instance_id":"w","incarnation":1,"model":"m","first_seq":1,"events":[{"kind":"removed","keys":["00"]}]}',
        '{"instance_id":"w","incarnation":1,"model":"m","first_seq":1,"events":[{"kind":"removed","keys":["zz"]}]}',
        '{"a": ' + "[" * 100_000,
    ],
)
def test_bad_json_is_refused(text: str) -> None:
    with pytest.raises(DecodeFailed):
        decode_events(text.encode(), CONTENT_TYPE_JSON)


def test_bad_msgpack_is_refused() -> None:
    with pytest.raises(DecodeFailed):
        decode_events(b"\xc1", CONTENT_TYPE)
