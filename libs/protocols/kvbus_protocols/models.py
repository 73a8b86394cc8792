"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """``max_model_len``: the context length in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvbus"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
