"""Request extensions: ``nvext`` with the fields that Dynamo defines, and our own ``kvbus`` object.

Unknown fields in either are refused, as Dynamo does: a misspelt hint would otherwise do nothing without a word.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbus_protocols.errors import InvalidRequest

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]

ShortText = Annotated[str, Meta(max_length=256)]
InstanceId = Annotated[int, Meta(ge=0)] | ShortText
"""Dynamo numbers its instances, here they have names."""

_LAST_TOKEN = 2**31 - 1  # no prompt is that long, and every wire format has room for it
FINISH_KINDS = ("stop", "length", "stop_sequence")
MAX_RETENTION_RANGES = 64
MAX_TAINTS = 64
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3


class AgentHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``priority``: higher is sooner; ``strict_priority``: an absolute tier in the queue; ``osl``: expected output tokens;
    ``speculative_prefill``: warm the cache for the next turn; ``latency_sensitivity``: the older name of a priority."""

    priority: Int32 | None = None
    strict_priority: UInt32 | None = None
    osl: UInt32 | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class MetadataUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class RoutingConstraints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``required_taints``: only workers that have all of them; ``preferred_taints``: the cost of a worker that has one is
    multiplied by its factor (below 1: preferred, above 1: avoided), from 0.001 to 1000."""

    required_taints: Annotated[list[ShortText], Meta(max_length=MAX_TAINTS)] | None = None
    preferred_taints: Annotated[dict[ShortText, float], Meta(max_length=MAX_TAINTS)] | None = None


class RouterTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In milliseconds."""

    ttft_target: float | None = None
    itl_target: float | None = None


class NvExt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``greed_sampling``: take the likeliest token; ``use_raw_prompt``: no chat template; ``token_data``: the prompt as tokens;
    ``cache_salt``: requests with different salts share no cached blocks; ``*_id`` and ``*_rank``: where the request has to run;
    ``annotations``, ``extra_fields``: what the response should tell besides."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: InstanceId | None = None
    prefill_worker_id: InstanceId | None = None
    decode_worker_id: InstanceId | None = None
    dp_rank: UInt32 | None = None
    prefill_dp_rank: UInt32 | None = None
    token_data: list[UInt32] | None = None
    max_thinking_tokens: UInt32 | None = None
    cache_salt: ShortText | None = None
    extra_fields: list[str] | None = None
    metadata_upload: MetadataUpload | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: float | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterTargets | None = None

    @property
    def pin(self) -> str | None:
        """The worker that has to serve the request."""
        return _named(self.decode_worker_id if self.decode_worker_id is not None else self.backend_instance_id)

    @property
    def prefill_pin(self) -> str | None:
        """The worker that has to compute the prompt for it."""
        return _named(self.prefill_worker_id)


def _named(instance: InstanceId | None) -> str | None:
    return None if instance is None or instance == "" else str(instance)


class MockScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Raw model output that the mock engine plays; every other engine refuses it. ``chunks``: pieces of one step each."""

    output: str | None = None
    finish: str | None = None
    chunks: list[str] | None = None


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent session of a request; ``final``: nothing follows in it; ``ephemeral``: its blocks need not outlive it."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    parent: ShortText | None = None
    final: bool = False
    ephemeral: bool = False


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"kind": "class"}):
    """How long the blocks of the prompt's tokens [``start_token``, ``end_token``) are worth keeping (None: from its beginning, to
    its end). ``priority``: higher stays longer; ``class``: pinned blocks stay for ``ttl_s``, ephemeral ones go first."""

    start_token: Annotated[int, Meta(ge=0, le=_LAST_TOKEN)] | None = None
    end_token: Annotated[int, Meta(ge=1, le=_LAST_TOKEN)] | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    kind: Literal["pinned", "normal", "ephemeral"] = "normal"


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next request of the session is expected so long after this one: bring its blocks back by then."""

    after_s: Annotated[float, Meta(ge=0, le=86400)]


class KvbusExt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mock: MockScript | None = None
    session: Session | None = None
    retention: list[Retention] | None = None
    prefetch: Prefetch | None = None


class ServedBy(msgspec.Struct, frozen=True):
    """The instances that served a request; one and the same where prefill and decode are not apart."""

    prefill_worker_id: str
    decode_worker_id: str


class Timing(msgspec.Struct, frozen=True):
    """``ttft_ms``: from the request to its first token. ``kv_hit_rate``: cached share of the prompt."""

    request_received_ms: float
    ttft_ms: float | None
    total_time_ms: float
    kv_hit_rate: float


class RoutingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the request would have taken on one worker. ``verdict``: why it could not go there; empty when it could, and only then
    the numbers mean anything. ``cost_ms`` = (``wait_ms`` + ``onboard_ms`` + ``prefill_ms`` + ``work_ms`` + ``decode_ms``) *
    ``taint_factor`` - ``affinity_ms``; the first three are the predicted time to the first token. ``onboard_tokens``: by source.
    """

    worker_id: str
    verdict: str
    cost_ms: float
    ttft_ms: float
    wait_ms: float
    onboard_ms: float
    prefill_ms: float
    work_ms: float
    decode_ms: float
    affinity_ms: float
    taint_factor: float
    cached_tokens: int
    inflight_tokens: int
    onboard_tokens: dict[str, int]
    uncached_tokens: int
    waiting_tokens: int
    active: int
    running: int


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Why the request ran where it did. ``session_worker_id``: who served the session's last request. ``left_out``: so many workers
    more were looked at."""

    worker_id: str
    policy: str
    queued_ms: float
    session_worker_id: str
    workers: list[RoutingTerms]
    left_out: int


class NvExtAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``nvext`` of a response: what ``extra_fields`` asked for. ``routing`` is ours, the others are Dynamo's."""

    worker_id: ServedBy | None = None
    timing: Timing | None = None
    completion_token_ids: list[int] | None = None
    routing: Routing | None = None


ROUTING_FIELD = "routing"
"""The extra field that asks the router to explain itself."""

ANNOTATIONS = ("request_id", "formatted_prompt", "token_ids", "llm_metrics")
"""Known annotations: events of these names beside the chunks of a stream. Others are ignored, as are unknown extra fields."""


class LlmMetrics(msgspec.Struct, frozen=True):
    """Data of ``event: llm_metrics``."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int


def check_nvext(nvext: NvExt | None, choices: int) -> None:
    """Raise InvalidRequest for what the types alone cannot say."""
    if nvext is None:
        return
    upload = nvext.metadata_upload
    if upload is not None and not upload.url.strip():
        raise InvalidRequest("invalid nvext: metadata_upload.url must not be empty", param="nvext.metadata_upload.url")
    constraints = nvext.routing_constraints
    factors = (constraints.preferred_taints or {}).values() if constraints is not None else ()
    if not all(LEAST_FACTOR <= factor <= MOST_FACTOR for factor in factors):
        raise InvalidRequest(
            f"invalid nvext: factors of preferred_taints go from {LEAST_FACTOR:g} to {MOST_FACTOR:g}",
            param="nvext.routing_constraints.preferred_taints",
        )
    if choices > 1 and "completion_token_ids" in (nvext.extra_fields or ()):
        raise InvalidRequest(
            "invalid nvext: 'completion_token_ids' requires exactly one generated choice", param="nvext.extra_fields"
        )


def check_kvbus(kvbus: KvbusExt | None) -> None:
    """Raise InvalidRequest for what the types alone cannot say."""
    if kvbus is None:
        return
    if kvbus.mock is not None and kvbus.mock.finish is not None and kvbus.mock.finish not in FINISH_KINDS:
        raise InvalidRequest(f"'finish' must be one of {', '.join(FINISH_KINDS)}.", param="kvbus.mock.finish")
    ranges = kvbus.retention or []
    if len(ranges) > MAX_RETENTION_RANGES:
        raise InvalidRequest(
            f"'kvbus.retention' holds {len(ranges)} ranges; at most {MAX_RETENTION_RANGES} are allowed.",
            param="kvbus.retention",
        )
    for i, kept in enumerate(ranges):
        where = f"kvbus.retention[{i}]"
        if kept.end_token is not None and kept.end_token <= (kept.start_token or 0):
            raise InvalidRequest(f"'{where}' ends before it begins.", param=f"{where}.end_token")
        if kept.kind == "pinned" and kept.ttl_s is None:
            raise InvalidRequest(f"'{where}' is pinned and needs a 'ttl_s'.", param=f"{where}.ttl_s")
