"""The models that a server lists, and the one to use."""

from collections.abc import Sequence
from typing import Annotated

import msgspec


class NoChoice(Exception):
    """No model fits, or several do; the text is one line for the person at the terminal."""


Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\"'`$\\]+\Z")]
"""Nothing that could end a line of an environment file, or mean something to a shell: it goes into both."""


class Provider(msgspec.Struct, frozen=True):
    max_completion_tokens: Tokens | None = None


class Facts(msgspec.Struct, frozen=True):
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_efforts: tuple[str, ...] = ()


class ListedModel(msgspec.Struct, frozen=True):
    """An entry of ``GET /v1/models``, as far as it matters here. ``root``: the model's own name where ``id`` is an alias."""

    id: Name
    root: str | None = None
    max_model_len: Tokens | None = None
    context_length: Tokens | None = None
    top_provider: Provider = Provider()
    kvbus: Facts = Facts()

    @property
    def context_tokens(self) -> int | None:
        return self.context_length or self.max_model_len


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ListedModel, ...]


LONGEST_ANSWER = 32_000
_ANSWER_SHARE = 4


def chosen_model(models: Sequence[ListedModel], name: str) -> ListedModel:
    """The one of this name; without a name the only one there is, aliases aside. Raise NoChoice."""
    if not models:
        raise NoChoice("the server has no model yet")
    if name:
        found = next((model for model in models if model.id == name), None)
        if found is None:
            raise NoChoice(f"the server has no model {name!r}, but {', '.join(model.id for model in models)}")
        return found
    own = [model for model in models if model.root in (None, model.id)] or list(models)
    if len(own) > 1:
        raise NoChoice(f"the server has several models: choose by --model {'|'.join(model.id for model in own)}")
    return own[0]


def answer_tokens(model: ListedModel, context_tokens: int) -> int:
    """What a client should leave for an answer: a quarter of the context, within what the server allows and what agents need."""
    allowed = model.top_provider.max_completion_tokens or context_tokens
    return max(1, min(allowed, LONGEST_ANSWER, context_tokens // _ANSWER_SHARE))
