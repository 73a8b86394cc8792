from typing import Any

import msgspec
import pytest

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_wire.errors import ErrorCode
from kvbus_wire.guidance import Guidance
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import AgentHints, MockOutput, Sampling, Stopping
from kvbus_wire.worker import Generate
from kvbus_worker.core.admission import ModelLimits, PrefixGone, admit
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlocksStored, EngineError

LIMITS = ModelLimits(
    name="m", fingerprint="f", kv_layout="l", block_size=4, context_length=64, vocab_size=100, engine="mock"
)
DOMAIN = CacheDomain(model_fingerprint="f", block_size=4, kv_layout="l").key()


def _generate(ids: list[int], /, **fields: Any) -> Generate:
    base = Generate(
        request_id="r",
        model="m",
        frontend_id="f",
        tokens=pack_tokens(ids),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=8),
        deadline_ms=2000,
    )
    return msgspec.structs.replace(base, **fields)


def _store_with(tokens: list[int], domain: bytes = DOMAIN) -> tuple[TokenStore, list[bytes]]:
    store = TokenStore(100, 4)
    packed = pack_tokens(tokens)
    keys = chain_keys(domain, packed, 4)
    store.apply(BlocksStored(b"", tuple(keys), tuple(packed[16 * i : 16 * i + 16] for i in range(len(keys)))))
    return store, keys


def test_a_whole_prompt_becomes_an_engine_request_with_its_keys() -> None:
    admitted = admit(_generate(list(range(9)), hints=AgentHints(priority=3)), LIMITS, TokenStore(10, 4), 1000)
    assert admitted.request.tokens == list(range(9))
    assert admitted.request.priority == 3
    assert admitted.request.domain_key == DOMAIN
    assert admitted.keys == chain_keys(DOMAIN, pack_tokens(range(8)), 4)


def test_reuse_leaves_the_last_token_to_compute() -> None:
    assert len(admit(_generate(list(range(8))), LIMITS, TokenStore(10, 4), 1000).keys) == 1


def test_a_known_prefix_is_put_before_the_tokens() -> None:
    store, keys = _store_with(list(range(12)))
    message = _generate([50, 51], prefix_key=keys[1], prefix_tokens=8)
    admitted = admit(message, LIMITS, store, 1000)
    assert admitted.request.tokens == [*range(8), 50, 51]
    assert admitted.keys == keys[:2]
    assert admitted.packed == pack_tokens([*range(8), 50, 51])


@pytest.mark.parametrize("salt", ["", "other tenant"])
def test_a_prefix_that_is_gone_or_of_another_domain_asks_for_tokens(salt: str) -> None:
    store, keys = _store_with(list(range(8)))
    key = keys[1] if salt else b"x" * 16
    with pytest.raises(PrefixGone):
        admit(_generate([1], prefix_key=key, prefix_tokens=8, cache_salt=salt), LIMITS, store, 1000)


def test_a_prefix_of_another_length_asks_for_tokens() -> None:
    store, keys = _store_with(list(range(8)))
    with pytest.raises(PrefixGone):
        admit(_generate([1], prefix_key=keys[1], prefix_tokens=4), LIMITS, store, 1000)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "other"}, ErrorCode.MODEL_NOT_FOUND, "model"),
        ({"lora": "x"}, ErrorCode.UNSUPPORTED, "lora"),
        ({"deadline_ms": 1000}, ErrorCode.DEADLINE_EXCEEDED, None),
        ({"tokens": b"abc"}, ErrorCode.INVALID_REQUEST, "tokens"),
        ({"tokens": b""}, ErrorCode.INVALID_REQUEST, "tokens"),
        ({"tokens": pack_tokens([1, 100])}, ErrorCode.INVALID_REQUEST, "tokens"),
        ({"tokens": pack_tokens([1] * 64)}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, None),
        ({"resumed": 2}, ErrorCode.INVALID_REQUEST, "resumed"),
        ({"resumed": -1}, ErrorCode.INVALID_REQUEST, "resumed"),
        ({"stopping": Stopping(max_tokens=0)}, ErrorCode.INVALID_REQUEST, "stopping"),
        ({"sampling": Sampling(temperature=float("nan"))}, ErrorCode.INVALID_REQUEST, "sampling"),
        ({"request_id": ""}, ErrorCode.INVALID_REQUEST, "request_id"),
    ],
)
def test_what_cannot_run_is_refused_with_a_typed_error(
    fields: dict[str, Any], code: ErrorCode, param: str | None
) -> None:
    with pytest.raises(EngineError) as caught:
        admit(_generate([1, 2], **fields), LIMITS, TokenStore(10, 4), 1000)
    assert (caught.value.reply.code, caught.value.reply.param) == (code, param)


def test_a_too_long_prompt_names_the_numbers() -> None:
    with pytest.raises(EngineError) as caught:
        admit(_generate([1] * 70), LIMITS, TokenStore(10, 4), 1000)
    assert caught.value.reply.details == {"prompt_tokens": 70, "context_length": 64}


def test_given_output_is_refused_for_every_engine_but_the_mock() -> None:
    limits = msgspec.structs.replace(LIMITS, engine="torch")
    with pytest.raises(EngineError) as caught:
        admit(_generate([1], mock=MockOutput(output="x")), limits, TokenStore(10, 4), 1000)
    assert caught.value.reply.code is ErrorCode.UNSUPPORTED


def test_guidance_is_handed_on_to_engines_that_have_it_and_to_the_mock() -> None:
    guidance = Guidance(form="json_object", param="response_format")
    for limits in (LIMITS, msgspec.structs.replace(LIMITS, engine="torch", guidance=True)):
        admitted = admit(_generate([1], guidance=guidance), limits, TokenStore(10, 4), 1000)
        assert admitted.request.guidance == guidance


def test_guidance_is_refused_where_the_engine_has_none() -> None:
    limits = msgspec.structs.replace(LIMITS, engine="third-party")
    guidance = Guidance(form="json_object", param="response_format")
    with pytest.raises(EngineError) as caught:
        admit(_generate([1], guidance=guidance), limits, TokenStore(10, 4), 1000)
    assert (caught.value.reply.code, caught.value.reply.param) == (ErrorCode.UNSUPPORTED, "response_format")
    assert not caught.value.reply.retryable
