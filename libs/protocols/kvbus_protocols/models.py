"""``GET /v1/models`` and ``GET /v1/models/{id}``, as OpenAI and as Anthropic have them."""

from datetime import UTC, datetime
from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """``root``: the model's own name, where ``id`` is another name for it; ``max_model_len``: the context length in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvbus"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """``created_at``: RFC 3339. ``max_input_tokens``, ``max_tokens``: both are bounded by the context length."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """One page; ``first_id`` and ``last_id`` are those of its items."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def anthropic_model(model: Model) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
    )
