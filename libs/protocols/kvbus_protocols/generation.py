"""What all text-generating requests have in common: sampling, stopping, extensions; and usage in their responses."""

import re
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import KvbusExt, NvExt, ShortText, UInt32, check_kvbus, check_nvext

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 4096
_CACHE_TIME = re.compile(r"in[-_]memory|[1-9][0-9]{0,6}[smhd]")
"""How long a prompt is to be kept: as long as it happens to be, or a time as 24h."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """None means not given: the model's own generation defaults apply. Fields after ``user`` are widespread extensions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: str | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[UInt32], Meta(max_length=256)] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: ShortText | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    nvext: NvExt | None = None
    kvbus: KvbusExt | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_param(self) -> str:
        """The field that `stop_strings` come from."""
        return "stop"

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_stream_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives each token's log probability comes with; None: no log probabilities."""
        return None

    def check_generation(self) -> None:
        """Raise InvalidRequest for what the types alone cannot say."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' is only allowed when 'stream' is enabled.", param="stream_options")
        stops, param = self.stop_strings, self.stop_param
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"'{param}' holds {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed.", param=param
            )
        if any(len(text) > MAX_STOP_LENGTH for text in stops):
            raise InvalidRequest(f"A stop string is longer than {MAX_STOP_LENGTH} characters.", param=param)
        if any(not text for text in stops):
            raise InvalidRequest("A stop string may not be empty.", param=param)
        kept = self.prompt_cache_retention
        if kept is not None and not _CACHE_TIME.fullmatch(kept):
            raise InvalidRequest(
                "Invalid value for 'prompt_cache_retention': expected 'in_memory', or a time such as '24h' (a number of at most 7 "
                "digits, and s, m, h or d).",
                param="prompt_cache_retention",
                code="invalid_value",
            )
        if self.logit_bias is not None:
            self._check_logit_bias(self.logit_bias)
        check_nvext(self.nvext, self.n or 1)
        check_kvbus(self.kvbus)

    @staticmethod
    def _check_logit_bias(bias: dict[int, float]) -> None:
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"'logit_bias' holds more than {MAX_LOGIT_BIAS} tokens.", param="logit_bias")
        if any(not 0 <= token_id < 2**32 for token_id in bias):
            raise InvalidRequest("'logit_bias' has a key that is no token id.", param="logit_bias")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """``cached_tokens`` of the prompt were not computed again. ``unpinned_tokens`` (ours): so many were to be kept for a time and
    are not, since the tenant's share is used up."""

    cached_tokens: int = 0
    unpinned_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """``prompt_tokens`` includes the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
        unpinned_tokens: int = 0,
    ) -> "Usage":
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens, unpinned_tokens or UNSET),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
        )


OptionalUsage = Usage | UnsetType | None
__all__ = ["UNSET", "GenerationRequest", "OptionalUsage", "StreamOptions", "Usage"]
