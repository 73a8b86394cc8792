"""``POST /v1/completions`` (the legacy API): request, response and stream chunks (which have one shape)."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import NvExtAnswer, UInt32
from kvbus_protocols.generation import GenerationRequest, OptionalUsage

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``prompt``: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[UInt32]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raise InvalidRequest for a mixed or empty list, or ids that are no token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("'prompt' may not be empty.", param="prompt")
        ids = [item for item in self.prompt if isinstance(item, int)]
        if ids and len(ids) == len(self.prompt):
            if any(not 0 <= token_id < 2**32 for token_id in ids):
                raise InvalidRequest("'prompt' holds a number that is no token id.", param="prompt")
            return [ids]
        texts: list[str | list[int]] = [item for item in self.prompt if not isinstance(item, int)]
        if ids or len({type(item) for item in texts}) > 1:
            raise InvalidRequest("'prompt' mixes text and token ids.", param="prompt")
        return texts

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        """Raise InvalidRequest for what the types alone cannot say."""
        self.check_generation()
        if self.suffix:
            raise InvalidRequest("'suffix' is not supported by this server.", param="suffix", code="unsupported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("'best_of' is supported only when it equals 'n'.", param="best_of", code="unsupported")


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """``text_offset``: where the token begins in the choice's text, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole response, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OptionalUsage = UNSET
    system_fingerprint: str | None = None
    nvext: NvExtAnswer | UnsetType = UNSET
