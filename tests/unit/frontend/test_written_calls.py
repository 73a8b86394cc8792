"""Calls come back as they were written, to who wrote them, and only if nobody changed them."""

import json
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.json_object import as_object
from kvbus_frontend.core.written_calls import WrittenCall, WrittenCalls, member_texts, value_digest

CALL = WrittenCall("call_ab12", "f", '{"b": 1,  "a": "x"}', {"b": "1", "a": "x"})


def store(*, limit_bytes: int = 1 << 20, limit_calls: int = 100, ttl_s: float = 10.0) -> WrittenCalls:
    return WrittenCalls(limit_bytes=limit_bytes, limit_calls=limit_calls, ttl_s=ttl_s)


def filled(*calls: WrittenCall, **limits: float) -> WrittenCalls:
    calls_store = store(**limits)  # type: ignore[arg-type]
    for call in calls:
        calls_store.add(call, now=0.0)
    return calls_store


@pytest.mark.parametrize("call_id", ["call_ab12", "callab12", "call-ab12"])
@pytest.mark.parametrize("arguments", ['{"b": 1,  "a": "x"}', '{"a":"x","b":1}', '{"a":"\\u0078","b":1.0}'])
def test_a_call_is_found_however_a_client_writes_it(call_id: str, arguments: str) -> None:
    assert filled(CALL).find(call_id, "f", arguments, now=1.0) == CALL


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("g", '{"b": 1, "a": "x"}'), ("f", '{"b": 2, "a": "x"}'), ("f", '{"b": true, "a": "x"}'),
        ("f", '{"b": "1", "a": "x"}'), ("f", "{}"), ("f", ""),
    ],
)  # fmt: skip
def test_a_call_that_was_changed_is_another(name: str, arguments: str) -> None:
    assert filled(CALL).find(CALL.id, name, arguments, now=1.0) is None


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("9007199254740993", "9007199254740992"),
        ("1234567890123456789", "1234567890123456800"),
        ("1" + "0" * 22, "1e+22"),
    ],
)
def test_a_number_that_a_client_of_doubles_has_rounded_is_the_same(written: str, sent: str) -> None:
    call = WrittenCall("call_1", "f", f'{{"id": {written}}}')
    assert filled(call).find("call_1", "f", f'{{"id":{sent}}}', now=1.0) == call


def test_numbers_beyond_all_doubles_are_what_they_are() -> None:
    huge = "1" + "0" * 400
    assert value_digest("f", f'{{"a": {huge}}}') == value_digest("f", f'{{"a":{huge}}}')
    assert value_digest("f", '{"a": 9007199254740991}') != value_digest("f", '{"a": 9007199254740990}')


def test_under_an_unknown_id_the_latest_call_of_the_same_value_is_found() -> None:
    other = WrittenCall("call_cd34", "f", '{"a":"x","b":1}')
    calls = filled(CALL, other)
    assert calls.find("toolu_1", "f", '{"b": 1, "a": "x"}', now=1.0) == WrittenCall("toolu_1", "f", other.arguments)
    assert calls.find(CALL.id, "f", '{"b": 1, "a": "x"}', now=1.0) == CALL


def test_ids_that_every_conversation_uses_are_no_trouble() -> None:
    first = WrittenCall("functions.f:0", "f", '{"x":1}')
    second = WrittenCall("functions.f:0", "f", '{"x": 2}')
    calls = filled(first, second)
    assert calls.find("functions.f:0", "f", '{"x": 1}', now=1.0) == first
    assert calls.find("functionsf0", "f", '{"x": 2}', now=1.0) == second


def test_text_that_is_no_json_is_its_own_value() -> None:
    broken = WrittenCall("c", "f", '{"path": "a.tx')
    assert filled(broken).find("c", "f", '{"path": "a.tx', now=1.0) == broken
    assert filled(broken).find("c", "f", '{"path": "a.t', now=1.0) is None
    deep = "[" * 100_000
    assert filled(WrittenCall("c", "f", deep)).find("c", "f", deep, now=1.0) is not None


def test_tenants_do_not_see_each_other() -> None:
    calls = store()
    calls.add(CALL, scope="a", now=0.0)
    assert calls.find(CALL.id, "f", CALL.arguments, scope="b", now=0.0) is None
    assert calls.find(CALL.id, "f", CALL.arguments, scope="a", now=0.0) == CALL


def test_what_is_not_asked_for_expires() -> None:
    calls = filled(CALL, ttl_s=10)
    assert calls.find(CALL.id, "f", CALL.arguments, now=9.0) == CALL
    assert calls.find(CALL.id, "f", CALL.arguments, now=18.0) == CALL
    assert calls.find(CALL.id, "f", CALL.arguments, now=28.0) is None
    calls.add(WrittenCall("x", "g", "{}"), now=28.0)
    assert len(calls) == 1


def numbered(number: int) -> WrittenCall:
    return WrittenCall(f"call_{number}", "f", f'{{"n": {number}}}')


def test_the_least_recently_used_goes_first() -> None:
    calls = filled(*map(numbered, range(3)), limit_calls=3)
    assert calls.find("call_0", "f", '{"n": 0}', now=1.0)
    calls.add(numbered(3), now=1.0)
    assert [calls.find(f"call_{i}", "f", f'{{"n": {i}}}', now=1.0) is not None for i in range(4)] == [
        True,
        False,
        True,
        True,
    ]


@given(
    numbers=st.lists(st.integers(0, 6), max_size=30), limit_bytes=st.integers(0, 5000), limit_calls=st.integers(0, 4)
)
def test_limits_hold_and_nothing_wrong_is_found(numbers: list[int], limit_bytes: int, limit_calls: int) -> None:
    calls = store(limit_bytes=limit_bytes, limit_calls=limit_calls)
    for now, number in enumerate(numbers):
        calls.add(WrittenCall(f"call_{number % 3}", "f", f'{{"n":  {number}}}'), now=float(now))
        calls.check_integrity()
        assert len(calls) <= limit_calls
        found = calls.find("other", "f", f'{{"n": {number}}}', now=float(now))
        assert found is None or found.arguments == f'{{"n":  {number}}}'


def test_the_counted_bytes_are_the_real_ones() -> None:
    calls = store(limit_bytes=1 << 30, limit_calls=10**6, ttl_s=1e9)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(3000):
            calls.add(WrittenCall(f"call_{i:024x}", f"name{i}", '{"text": "%s"}' % (f"{i} é " * 20)), now=float(i))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert calls.size_bytes * 0.8 < grown < calls.size_bytes * 1.1


def test_threads_may_share_a_store() -> None:
    calls, failures = store(limit_calls=5), list[BaseException]()

    def work(first: int) -> None:
        try:
            for i in range(200):
                calls.add(numbered((first + i) % 9), now=float(i))
                calls.find("x", "f", f'{{"n": {i % 9}}}', now=float(i))
        except BaseException as failure:  # whatever it is, the test must see it
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    calls.check_integrity()


def test_numbers_have_one_value_whatever_their_spelling() -> None:
    assert value_digest("f", '{"a": [1.0, 1e2, -0.0]}') == value_digest("f", '{"a":[1,100,0]}')
    assert value_digest("f", '{"a": 1.5}') != value_digest("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "members"),
    [
        (
            '{"a": 1.50,"b" :  {"x":[1 , 2]} ,"c":"\\u00e9", "a":true }',
            {"a": "true", "b": '{"x":[1 , 2]}', "c": '"\\u00e9"'},
        ),
        (" {} ", {}),
        ("[1]", {}),
        ('{"a": 1', {}),
        ('{"a" 1}', {}),
        ("", {}),
        ("{" * 10_000, {}),
    ],
)
def test_values_of_an_object_are_found_as_they_were_written(text: str, members: dict[str, str]) -> None:
    assert member_texts(text) == members


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(members=st.dictionaries(st.text(max_size=3), json_values, max_size=4), indent=st.sampled_from([None, 0, 3]))
def test_texts_of_values_have_the_values(members: dict[str, object], indent: int | None) -> None:
    texts = member_texts(json.dumps(members, indent=indent))
    assert {key: json.loads(text) for key, text in texts.items()} == members


@pytest.mark.parametrize("written", ['{"a": "two\nlines"}', '{"port": }', '{"a": 1}}', "just text"])
def test_a_call_that_was_no_json_is_found_by_the_input_that_clients_got_in_its_place(written: str) -> None:
    calls = store()
    calls.add(WrittenCall("call_1", "f", written), now=0)
    sent_back = json.dumps(json.loads(as_object(written)), separators=(",", ":"))
    found = calls.find("call_1", "f", sent_back, now=1)
    assert found is not None
    assert found.arguments == written
