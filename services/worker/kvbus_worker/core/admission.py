"""From a Generate message to an engine request: every check that needs neither the engine nor the bus."""

import math

import msgspec

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import TOKEN_BYTES, unpack_tokens
from kvbus_wire.worker import Generate, Prefetch
from kvbus_worker.core.retention import block_runs
from kvbus_worker.core.token_store import Prefix, TokenStore
from kvbus_worker.engines.base import EngineError, EngineRequest


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``vocab_size`` 0: unknown, ids are not checked. ``guidance``: the engine constrains output.

    The mock engine does not, and says what a script has it say: it takes such requests all the same.
    """

    name: str
    fingerprint: str
    kv_layout: str
    block_size: int
    context_length: int
    vocab_size: int
    engine: str
    guidance: bool = False
    max_retention_ranges: int = 256


class PrefixGone(Exception):
    """The worker does not hold the prefix (any more): it needs all tokens."""


class Prompt(msgspec.Struct, frozen=True):
    """``keys`` of the whole blocks that reuse may cover: at least the last token is left to compute. ``packed``: all tokens."""

    tokens: list[int]
    packed: bytes
    domain_key: bytes
    keys: list[bytes]


class Admitted(msgspec.Struct, frozen=True):
    """``keys`` of the whole blocks that reuse may cover: at least the last token is left to compute. ``packed``: all tokens."""

    request: EngineRequest
    packed: bytes
    keys: list[bytes]


def admit(message: Generate, limits: ModelLimits, store: TokenStore, now_ms: int, now_s: float = 0.0) -> Admitted:
    """Raise EngineError for what can never run here, PrefixGone when tokens are missing. ``now_s``: the clock of directives."""
    _check_envelope(message, limits, now_ms)
    prompt = resolve(message, limits, store)
    total = len(prompt.tokens)
    if not 0 <= message.resumed < total:
        raise EngineError(ErrorCode.INVALID_REQUEST, "resumed is not within the tokens", param="resumed")
    request = EngineRequest(
        request_id=message.request_id,
        tokens=prompt.tokens,
        domain_key=prompt.domain_key,
        sampling=message.sampling,
        stopping=message.stopping,
        resumed=message.resumed,
        priority=message.hints.effective_priority,
        strict_priority=message.hints.strict_priority,
        mock=message.mock,
        guidance=message.guidance,
        speculative=message.speculative,
        directives=block_runs(
            message.retention,
            total - message.resumed,
            limits.block_size,
            tenant=message.tenant,
            now_s=now_s,
            limit=limits.max_retention_ranges,
        ),
    )
    return Admitted(request, prompt.packed, prompt.keys)


def resolve(message: Generate | Prefetch, limits: ModelLimits, store: TokenStore) -> Prompt:
    """The prompt that a message names. Raise as `admit`."""
    if message.model != limits.name:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"this worker serves {limits.name}, not {message.model}", param="model"
        )
    if message.lora:
        raise EngineError(ErrorCode.UNSUPPORTED, "this worker has no LoRA adapters", param="lora")
    suffix = _checked_tokens(message.tokens, limits.vocab_size)
    total = message.prefix_tokens + len(suffix)
    _check_length(total, limits)
    domain_key = CacheDomain(
        model_fingerprint=limits.fingerprint,
        block_size=limits.block_size,
        kv_layout=limits.kv_layout,
        lora=message.lora,
        salt=message.cache_salt,
    ).key()
    prefix = _resolve(message, store, domain_key)
    packed = prefix.tokens + message.tokens
    reusable = (total - 1) // limits.block_size
    keys = prefix.keys[:reusable]
    done = len(keys) * limits.block_size
    rest = memoryview(packed)[done * TOKEN_BYTES : reusable * limits.block_size * TOKEN_BYTES]
    keys += chain_keys(domain_key, rest, limits.block_size, keys[-1] if keys else b"")
    return Prompt(unpack_tokens(prefix.tokens) + suffix, packed, domain_key, keys)


def _check_envelope(message: Generate, limits: ModelLimits, now_ms: int) -> None:
    if not message.request_id or not message.frontend_id:
        raise EngineError(ErrorCode.INVALID_REQUEST, "request_id or frontend_id is empty", param="request_id")
    if message.mock is not None and limits.engine != "mock":
        raise EngineError(ErrorCode.UNSUPPORTED, "only the mock engine takes given output", param="mock")
    if message.guidance is not None and not limits.guidance and limits.engine != "mock":
        raise EngineError(
            ErrorCode.UNSUPPORTED,
            f"the engine {limits.engine} does not constrain output",
            param=message.guidance.param or None,
        )
    if message.deadline_ms <= now_ms:
        raise EngineError(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed", late_ms=now_ms - message.deadline_ms)
    sampling, stopping = message.sampling, message.stopping
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        *sampling.logit_bias.values(),
    )
    if not all(math.isfinite(number) for number in numbers):
        raise EngineError(ErrorCode.INVALID_REQUEST, "a sampling parameter is not finite", param="sampling")
    if stopping.max_tokens < 1 or stopping.min_tokens < 0:
        raise EngineError(ErrorCode.INVALID_REQUEST, "max_tokens is below 1 or min_tokens below 0", param="stopping")


def _checked_tokens(packed: bytes, vocab_size: int) -> list[int]:
    try:
        tokens = unpack_tokens(packed)
    except ValueError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"tokens: {len(packed)} bytes are no whole number of ids", param="tokens"
        ) from error
    if tokens and vocab_size and (highest := max(tokens)) >= vocab_size:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"token id {highest} is not in the vocabulary of {vocab_size}",
            param="tokens",
            vocab_size=vocab_size,
        )
    return tokens


def _check_length(total: int, limits: ModelLimits) -> None:
    if total < 1:
        raise EngineError(ErrorCode.INVALID_REQUEST, "the prompt is empty", param="tokens")
    if total >= limits.context_length:
        raise EngineError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {total} tokens, the context length is {limits.context_length}",
            prompt_tokens=total,
            context_length=limits.context_length,
        )


def _resolve(message: Generate | Prefetch, store: TokenStore, domain_key: bytes) -> Prefix:
    if not message.prefix_key and not message.prefix_tokens:
        return Prefix(b"", [])
    prefix = store.resolve(message.prefix_key, domain_key) if message.prefix_key else None
    if prefix is None or len(prefix.tokens) != message.prefix_tokens * TOKEN_BYTES:
        raise PrefixGone(message.request_id)
    return prefix
