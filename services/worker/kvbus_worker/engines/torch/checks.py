"""What a request must satisfy before it is queued."""

import math
from collections.abc import Sequence

from kvbus_blocks.keys import KEY_BYTES
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import TOKEN_BYTES
from kvbus_wire.request import Sampling
from kvbus_worker.engines.base import EngineError, EngineInfo, EngineRequest

_MAX_BIAS_TOKENS = 1024
_MAX_STOP_IDS = 1024


def check_request(request: EngineRequest, info: EngineInfo, vocab_size: int, max_logprobs: int) -> None:
    """Raise EngineError for what cannot run."""
    if request.mock is not None:
        raise EngineError(ErrorCode.UNSUPPORTED, "only the mock engine takes its output from the request", param="mock")
    length = len(request.tokens)
    if not 0 <= request.resumed < max(length, 1):
        raise _invalid("resumed", f"{request.resumed} of {length} tokens cannot be earlier output")
    if length == 0:
        raise _invalid("tokens", "the prompt is empty")
    if length >= info.context_length and not request.resumed:
        raise EngineError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {length} tokens; the context of {info.context_length} leaves no room for output",
            param="tokens",
            prompt_tokens=length,
            context_length=info.context_length,
        )
    if length > info.context_length:
        raise _invalid("resumed", f"{length} tokens are more than the context of {info.context_length}")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab_size:
        raise _invalid("tokens", f"token ids must be from 0 to {vocab_size - 1}")
    stopping = request.stopping
    if stopping.max_tokens < 1:
        raise _invalid("max_tokens", "max_tokens must be at least 1")
    if stopping.min_tokens < 0:
        raise _invalid("min_tokens", "min_tokens must not be negative")
    if len(stopping.stop_token_ids) > _MAX_STOP_IDS:
        raise _invalid("stop_token_ids", f"at most {_MAX_STOP_IDS} stop tokens")
    if any(not 0 <= token < vocab_size for token in stopping.stop_token_ids):
        raise _invalid("stop_token_ids", f"token ids must be from 0 to {vocab_size - 1}")
    _check_sampling(request.sampling, vocab_size, max_logprobs)


def _check_sampling(sampling: Sampling, vocab_size: int, max_logprobs: int) -> None:
    ranges = (
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf),
        ("top_p", sampling.top_p, 0.0 <= sampling.top_p <= 1.0),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0 < sampling.repetition_penalty < math.inf),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty)),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty)),
        ("logprobs", sampling.logprobs, sampling.logprobs is None or 0 <= sampling.logprobs <= max_logprobs),
    )
    for name, value, is_right in ranges:
        if not is_right:
            raise _invalid(name, f"{name} {value} is out of range")
    if len(sampling.logit_bias) > _MAX_BIAS_TOKENS:
        raise _invalid("logit_bias", f"at most {_MAX_BIAS_TOKENS} biased tokens")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise _invalid("logit_bias", f"the bias {bias} of token {token} is out of range")


def _invalid(param: str, message: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, message, param=param)


def check_blocks(
    info: EngineInfo, keys: Sequence[bytes], data: Sequence[memoryview], tokens: Sequence[bytes] | None = None
) -> None:
    """Raise EngineError when the lists or their sizes do not fit together."""
    if len(keys) != len(data) or (tokens is not None and len(tokens) != len(keys)):
        raise _invalid("keys", "keys, tokens and data must be equally many")
    if any(len(key) != KEY_BYTES for key in keys):
        raise _invalid("keys", f"a key has {KEY_BYTES} bytes")
    if any(block.nbytes != info.block_bytes for block in data):
        raise _invalid("data", f"a block has {info.block_bytes} bytes")
    if any(len(packed) != info.block_size * TOKEN_BYTES for packed in tokens or ()):
        raise _invalid("tokens", f"a block has {info.block_size} tokens")
