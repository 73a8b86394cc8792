"""The messages that bring one choice of a request to a worker."""

import msgspec

from kvbus_frontend.core.prompt import Prompt
from kvbus_wire.guidance import Guidance
from kvbus_wire.packing import TOKEN_BYTES
from kvbus_wire.request import AgentHints, MockOutput, Retention, Sampling, SessionRef, Stopping
from kvbus_wire.router import Placement, RouteRequest
from kvbus_wire.worker import Generate, Prefetch, RemotePrefill


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to generate. ``tenant``: who it counts for; ``client``: the name of the API key, to which its session belongs;
    ``allowed``: workers that serve exactly this model card (empty: all of the model's do); ``explain``: the router shall say why it
    goes where it goes; ``speculative``: it is only to have the prompt computed; ``prefetch_after_s``: the next request of its
    session is expected so long after its end."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    stopping: Stopping
    deadline_ms: int
    cache_salt: str = ""
    tenant: str = ""
    client: str = ""
    hints: AgentHints = AgentHints()
    session: SessionRef | None = None
    retention: tuple[Retention, ...] = ()
    mock: MockOutput | None = None
    guidance: Guidance | None = None
    allowed: tuple[str, ...] = ()
    pinned: str | None = None
    prefill_pinned: str | None = None
    required_taints: tuple[str, ...] = ()
    preferred_taints: dict[str, float] = {}
    explain: bool = False
    speculative: bool = False
    prefetch_after_s: float | None = None


def route_request(job: Job, prompt: Prompt, excluded: tuple[str, ...]) -> RouteRequest:
    """``prompt``: with the output so far. A worker that has failed is not pinned any more."""
    return RouteRequest(
        request_id=job.request_id,
        model=job.model,
        keys=prompt.keys,
        prompt_tokens=prompt.count,
        max_tokens=job.stopping.max_tokens,
        deadline_ms=job.deadline_ms,
        hints=job.hints,
        session=job.session,
        tenant=job.tenant,
        pinned=job.pinned if job.pinned not in excluded else None,
        prefill_pinned=job.prefill_pinned if job.prefill_pinned not in excluded else None,
        allowed=job.allowed,
        excluded=excluded,
        required_taints=job.required_taints,
        preferred_taints=job.preferred_taints,
        explain=job.explain,
        speculative=job.speculative,
    )


def generate_message(
    job: Job,
    prompt: Prompt,
    frontend_id: str,
    *,
    resumed: int,
    prefix_blocks: int,
    prefill: RemotePrefill | None = None,
) -> Generate:
    """``prefix_blocks``: so many leading blocks are named by their key only. The last prompt token always travels as a token.
    ``prefill``: who computes the prompt for the worker."""
    blocks = max(0, min(prefix_blocks, (prompt.count - 1) // prompt.block_size, prompt.blocks))
    prefix_tokens = blocks * prompt.block_size
    return Generate(
        request_id=job.request_id,
        model=job.model,
        frontend_id=frontend_id,
        tokens=prompt.tokens[prefix_tokens * TOKEN_BYTES :],
        sampling=job.sampling,
        stopping=job.stopping,
        deadline_ms=job.deadline_ms,
        prefix_key=prompt.prefix_key(blocks),
        prefix_tokens=prefix_tokens,
        resumed=resumed,
        cache_salt=job.cache_salt,
        hints=job.hints,
        session=job.session,
        retention=job.retention,
        mock=job.mock,
        guidance=job.guidance,
        speculative=job.speculative,
        prefill=prefill,
        tenant=job.tenant,
    )


def prefetch_message(job: Job, *, prefix_blocks: int) -> Prefetch:
    """``prefix_blocks``: so many leading blocks are named by their key only."""
    prompt = job.prompt
    blocks = max(0, min(prefix_blocks, prompt.blocks))
    prefix_tokens = blocks * prompt.block_size
    return Prefetch(
        request_id=job.request_id,
        model=job.model,
        tokens=prompt.tokens[prefix_tokens * TOKEN_BYTES :],
        deadline_ms=job.deadline_ms,
        prefix_key=prompt.prefix_key(blocks),
        prefix_tokens=prefix_tokens,
        cache_salt=job.cache_salt,
        retention=job.retention,
        tenant=job.tenant,
    )


def asked_pins(job: Job) -> int:
    """Tokens of the prompt that are to be pinned."""
    count = job.prompt.count
    pinned = (kept for kept in job.retention if kept.kind == "pinned")
    return sum(max(0, min(kept.end or count, count) - kept.start) for kept in pinned)


def known_blocks(placement: Placement, prompt: Prompt) -> int:
    """Leading blocks that the placed worker is believed to hold on its device."""
    return placement.cached_tokens // prompt.block_size
