"""``GET /v1/models`` and ``GET /v1/models/{id}``, as OpenAI and as Anthropic have them.

Both say the same facts. OpenAI's own fields name a model and no more; what clients look for beside them has the names of vLLM
(``root``, ``max_model_len``) and OpenRouter (``context_length``, ``architecture``, ``top_provider``, ``supported_parameters``).
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec


class Architecture(msgspec.Struct, frozen=True):
    input_modalities: Sequence[str] = ("text",)
    output_modalities: Sequence[str] = ("text",)


class TopProvider(msgspec.Struct, frozen=True, kw_only=True):
    """``max_completion_tokens``: the most that a request gets, with the shortest prompt."""

    context_length: int
    max_completion_tokens: int


class ServedAs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that have no name elsewhere; what is not known, or not there, is left out.

    ``reasoning_efforts``: the efforts that make a difference to the model's prompt, weakest first. ``structured_outputs``: schemas
    and grammars are enforced while decoding.
    """

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_efforts: Sequence[str] = ()
    structured_outputs: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """``root``: the model's own name, where ``id`` is another name for it. ``max_model_len``, ``context_length``: prompt and output
    together, in tokens. ``supported_parameters``: those of a chat request that have an effect, in OpenRouter's words, of which
    ``reasoning`` is that the model thinks."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvbus"
    root: str
    max_model_len: int
    context_length: int
    architecture: Architecture = Architecture()
    top_provider: TopProvider
    supported_parameters: Sequence[str]
    kvbus: ServedAs


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Support(msgspec.Struct, frozen=True):
    supported: bool


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """``created_at``: RFC 3339. ``capabilities``: a `Support` per capability, with one per kind of it inside."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    capabilities: Mapping[str, Mapping[str, object]]


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """One page; ``first_id`` and ``last_id`` are those of its items."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_entry(
    name: str, *, root: str, created: int, context_length: int, max_output_tokens: int, served: ServedAs
) -> Model:
    """The model under one of its names."""
    return Model(
        id=name,
        created=created,
        root=root,
        max_model_len=context_length,
        context_length=context_length,
        top_provider=TopProvider(context_length=context_length, max_completion_tokens=max_output_tokens),
        supported_parameters=_parameters(served),
        kvbus=served,
    )


_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "seed", "logit_bias", "logprobs", "top_logprobs",
)  # fmt: skip


def _parameters(served: ServedAs) -> list[str]:
    names = list(_SAMPLING)
    if served.tool_call_parser is not None:
        names += ["tools", "tool_choice", "parallel_tool_calls"]
    if served.reasoning_parser is not None:
        names.append("reasoning")
    if served.reasoning_efforts:
        names.append("reasoning_effort")
    if served.structured_outputs:
        names += ["response_format", "structured_outputs"]
    return names


def anthropic_model(model: Model) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.context_length,
        max_tokens=model.top_provider.max_completion_tokens,
        capabilities=_capabilities(model.kvbus),
    )


def _capabilities(served: ServedAs) -> Mapping[str, Mapping[str, object]]:
    """What is accepted and has no effect is no capability, but for ``thinking.types``, which tell what is accepted."""
    yes, no = Support(True), Support(False)
    reasons = Support(served.reasoning_parser is not None)
    efforts = served.reasoning_efforts
    effort_levels = {level: Support(level in efforts) for level in ("low", "medium", "high", "xhigh", "max")}
    thinking_types = {"adaptive": reasons, "enabled": reasons, "disabled": yes, "between_tools": yes}
    unsupported = {"supported": False}
    return {
        "batch": unsupported,
        "citations": unsupported,
        "code_execution": unsupported,
        "context_management": unsupported,
        "effort": {"supported": bool(efforts), **effort_levels},
        "image_input": unsupported,
        "pdf_input": unsupported,
        "server_tools": {"supported": False, "code_execution": no, "web_search": no},
        "structured_outputs": {"supported": served.structured_outputs},
        "thinking": {"supported": reasons.supported, "types": thinking_types},
    }
