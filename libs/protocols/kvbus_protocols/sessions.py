"""Agent sessions and bringing back their blocks: our own endpoints."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class SessionLeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The first ``tokens`` of the session's last prompt are kept until then (unix seconds)."""

    tokens: int
    expires_at: float


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``cached_tokens`` of its ``prompt_tokens`` were not computed again. ``blocks``: of its newest prompt with the answer;
    ``tiers``: how many of them lie in which tier, on the instance that has most (None: nobody tells). ``unpinned_tokens``: of the
    last prompt, asked to be kept, and not. ``prefetch_at``: when they are to be brought back (unix seconds)."""

    id: str
    object: Literal["session"] = "session"
    model: str
    parent: str | None
    ephemeral: bool
    final: bool
    created_at: float
    last_used_at: float
    requests: int
    running: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    unpinned_tokens: int
    worker_id: str | None
    blocks: int
    tiers: dict[str, int] | None
    leases: list[SessionLeaseInfo]
    prefetch_at: float | None


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """The newest first. For what follows, ask for those used ``before`` the ``last_used_at`` of the last one."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]
    has_more: bool


class DeletedSession(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks``: how many were freed, by tier. ``running``: so many requests of it still run; their blocks go when they end."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True
    blocks: dict[str, int]
    running: int


class PrefetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``session_id``, or a request of any API whose prompt is meant. ``timeout_s``: how long it may take."""

    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] | None = None


class PrefetchResult(msgspec.Struct, frozen=True, kw_only=True):
    """``cached_tokens`` of the prompt lie in the worker's G1 now; ``onboarded_tokens`` of them were brought back."""

    object: Literal["kv.prefetch"] = "kv.prefetch"
    model: str
    worker_id: str
    prompt_tokens: int
    cached_tokens: int
    onboarded_tokens: int
