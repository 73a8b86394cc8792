"""Request fields to what the engine is told. What a request leaves open comes from the model's generation_config.json, as in
vLLM: temperature, top_p, top_k, min_p, repetition_penalty, and max_new_tokens as the default token limit."""

from kvbus_protocols.errors import context_length_exceeded
from kvbus_protocols.extensions import MockScript
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import GenerationConfig
from kvbus_wire.request import AgentHints, MockOutput, Sampling, SessionRef, Stopping


def sampling_of(request: GenerationRequest, defaults: GenerationConfig, *, logprobs: int | None) -> Sampling:
    greedy = request.nvext is not None and request.nvext.greed_sampling
    return Sampling(
        temperature=0.0 if greedy else _first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, int(_first(request.top_k, defaults.top_k, 0))),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=request.logit_bias or {},
        logprobs=logprobs,
    )


def _first(asked: float | None, configured: float | None, default: float) -> float:
    if asked is not None:
        return asked
    return configured if configured is not None else default


def stopping_of(request: GenerationRequest, *, max_tokens: int, end_token_ids: tuple[int, ...]) -> Stopping:
    """``end_token_ids``: tokens that end a turn besides those that the engine knows."""
    ignore_eos = bool(request.ignore_eos)
    asked = tuple(request.stop_token_ids or ())
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=asked if ignore_eos else tuple(dict.fromkeys((*asked, *end_token_ids))),
        ignore_eos=ignore_eos,
    )


def token_budget(
    asked: int | None, default: int | None, *, prompt_tokens: int, context_length: int, longest: int = 0, param: str
) -> int:
    """How many tokens may be generated: what was asked for, at most what is left, and at most ``longest`` (0: no such limit).

    Raise InvalidRequest when not even one fits.
    """
    left = context_length - prompt_tokens
    if left < 1:
        raise context_length_exceeded(
            limit=context_length, prompt_tokens=prompt_tokens, completion_tokens=max(1, asked or 1), param=param
        )
    wanted = asked if asked is not None else default
    return min(limit for limit in (left, wanted, longest or None) if limit is not None)


def hints_of(request: GenerationRequest) -> AgentHints:
    given = request.nvext.agent_hints if request.nvext is not None else None
    if given is None:
        return AgentHints()
    return AgentHints(
        priority=given.priority or 0,
        strict_priority=given.strict_priority or 0,
        osl=given.osl,
        latency_sensitivity=given.latency_sensitivity,
        speculative_prefill=bool(given.speculative_prefill),
    )


def salt_of(request: GenerationRequest) -> str:
    if request.nvext is not None and request.nvext.cache_salt:
        return request.nvext.cache_salt
    return request.cache_salt or ""


def session_of(request: GenerationRequest) -> SessionRef | None:
    given = request.kvbus.session if request.kvbus is not None else None
    if given is None:
        return None
    return SessionRef(id=given.id, parent=given.parent, final=given.final, ephemeral=given.ephemeral)


def mock_of(request: GenerationRequest) -> MockOutput | None:
    given: MockScript | None = request.kvbus.mock if request.kvbus is not None else None
    if given is None:
        return None
    chunks = tuple(given.chunks or ())
    output = given.output if given.output is not None else "".join(chunks)
    return MockOutput(output=output, finish=given.finish or "stop", chunks=chunks)
