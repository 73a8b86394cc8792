"""Bytes to requests: every fault is a 400 that names the field."""

from typing import Literal

import msgspec
import pytest

from kvbus_protocols import InvalidRequest, RequestDecoder
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.decoding import replace_lone_surrogates

DECODER = RequestDecoder(ChatRequest)
HEAD = b'{"model":"m","messages":[{"role":"user","content":"x"}]'


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
        (HEAD + b"} trailing", "invalid_json"),
        (HEAD + b',"temperature":NaN}', "invalid_json"),
        (b'{"model":"\xff"}', "invalid_utf8"),
        (HEAD + b',"unknown":"\xc3"}', "invalid_utf8"),
        (b'\xef\xbb\xbf{"model":"m"}', "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'"text"', "invalid_value"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        DECODER.decode(body)
    assert (refusal.value.status, refusal.value.code) == (400, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"temperature":"hot"', "temperature"),
        (b'"temperature":2.5', "temperature"),
        (b'"temperature":-0.1', "temperature"),
        (b'"temperature":1e999', "temperature"),
        (b'"max_tokens":"ten"', "max_tokens"),
        (b'"max_tokens":0', "max_tokens"),
        (b'"max_completion_tokens":1.5', "max_completion_tokens"),
        (b'"n":0', "n"),
        (b'"n":true', "n"),
        (b'"top_p":0', "top_p"),
        (b'"stream":"yes"', "stream"),
        (b'"stop":[1]', "stop[0]"),
        (b'"stop":{"a":1}', "stop"),
        (b'"seed":99999999999999999999', "seed"),
        (b'"top_logprobs":21', "top_logprobs"),
        (b'"logit_bias":{"x":1}', "logit_bias"),
        (b'"logit_bias":{"1":101}', "logit_bias[...]"),
        (b'"presence_penalty":3', "presence_penalty"),
        (b'"nvext":{"agent_hints":{"priority":"high"}}', "nvext.agent_hints.priority"),
        (b'"nvext":5', "nvext"),
        (b'"kvbus":{"mock":{"output":5}}', "kvbus.mock.output"),
        (b'"kvbus":{"session":{}}', "kvbus.session.id"),
        (b'"tools":[{"type":"function","function":{}}]', "tools[0].function.name"),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(fields: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        DECODER.decode(HEAD + b"," + fields + b"}")
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[{"role":"user"}]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":[{"content":"x"}]}', "messages[0].role"),
        (b'{"model":"m","messages":[{"role":"user"},{"role":5}]}', "messages[1].role"),
        (b'{"model":"m","messages":[{"role":"user","content":5}]}', "messages[0].content"),
        (b'{"model":"m","messages":[{"role":"user","content":[{"text":"x"}]}]}', "messages[0].content[0].type"),
        (b'{"model":"m","messages":"hello"}', "messages"),
        (b'{"model":5,"messages":[{"role":"user"}]}', "model"),
    ],
)
def test_a_missing_or_wrong_part_of_the_conversation_is_named(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        DECODER.decode(body)
    assert refusal.value.param == param


@pytest.mark.parametrize("where", [b'"unknown":', b'"chat_template_kwargs":{"a":'])
def test_nesting_without_end_is_refused(where: bytes) -> None:
    closing = b"}" if b"{" in where else b""
    with pytest.raises(InvalidRequest) as refusal:
        DECODER.decode(HEAD + b"," + where + b"[" * 100_000 + b"]" * 100_000 + closing + b"}")
    assert refusal.value.code == "nesting_too_deep"


def test_null_means_not_given_and_unknown_fields_are_ignored() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")]
    body = HEAD + b"".join(b',"%s":null' % name.encode() for name in names) + b',"brand_new":{"x":[1]}}'
    request = DECODER.decode(body)
    request.check()
    assert all(getattr(request, name) is None for name in names)


def test_a_whole_number_is_a_temperature_too() -> None:
    assert DECODER.decode(HEAD + b',"temperature":1,"top_p":1}').temperature == 1.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00", "\ufffd"),
        (rb"a\ud83db", "a\ufffdb"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\\ud83d", r"\ud83d"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\uD83D\n", "\ufffd\n"),
    ],
)
def test_half_an_emoji_becomes_a_replacement_character(given: bytes, text: str) -> None:
    request = DECODER.decode(b'{"model":"m","messages":[{"role":"user","content":"' + given + b'"}]}')
    assert request.messages[0].content == text


def test_text_without_surrogates_is_left_alone() -> None:
    body = rb'{"a":"\u00e9\n\"\\ud800 \ud83d\ude00"}'
    assert replace_lone_surrogates(body) == body


class _Mark(msgspec.Struct):
    ttl: Literal["5m", "1h"] | None = None
    kind: Literal["a"] = "a"


class _Part(msgspec.Struct, tag_field="type", tag="part"):
    mark: _Mark | None = None


class _Other(msgspec.Struct, tag_field="type", tag="other"):
    kind: Literal["b"] = "b"


class _Marked(msgspec.Struct):
    parts: list[_Part | _Other]


def test_of_a_field_that_takes_certain_values_these_are_named() -> None:
    decoder = RequestDecoder(_Marked)
    with pytest.raises(InvalidRequest, match=r"'parts\[0\]\.mark\.ttl': invalid enum value '2h' \(known: 1h, 5m\)"):
        decoder.decode(b'{"parts": [{"type": "part", "mark": {"ttl": "2h"}}]}')
    # one name, two meanings: nothing is said rather than something wrong
    with pytest.raises(InvalidRequest, match=r"invalid enum value 'z'\.$"):
        decoder.decode(b'{"parts": [{"type": "other", "kind": "z"}]}')
