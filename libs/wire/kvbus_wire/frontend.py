"""Messages to a frontend: what one engine step produced, in one message; and what other frontends want of it."""

from typing import Annotated

import msgspec

from kvbus_wire.errors import ErrorReply
from kvbus_wire.message import Message, Part

# Far beyond what is ever sent, and far enough below what msgpack can hold to be counted on from.
FrameNumber = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The engine began a request. ``cached_tokens`` were in G1, ``onboarded_tokens`` of them had been fetched from a lower
    tier."""

    request_id: str
    cached_tokens: int
    onboarded_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """``top``: (token id, natural log probability), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens ``start`` .. of a request (packed u32), and their logprobs when asked for."""

    request_id: str
    start: int
    tokens: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


class Usage(Part, frozen=True):
    """True token counts. ``cached_tokens`` of the prompt were not computed, from whichever tier they came. ``unpinned_tokens``
    were to be pinned and are not, since the tenant's share of pinned blocks is used up."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    onboarded_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    unpinned_tokens: int = 0


class Ended(Part, frozen=True):
    """The one terminal event of a request. ``reason``: stop, length, cancelled or error.

    ``stop_token_id``: the token that ended it (EOS or a stop id; it is not part of the output).
    """

    request_id: str
    reason: str
    usage: Usage
    stop_token_id: int | None = None
    error: ErrorReply | None = None


class StepFrame(Message, frozen=True):
    """Everything one step produced for one frontend; an empty frame is a heartbeat.

    ``seq`` counts 1, 2, 3.. per (worker incarnation, frontend). A heartbeat carries the seq of the last frame that was not empty
    and is not kept for replay, so a lost last frame is noticed by the next heartbeat.
    """

    worker_id: str
    incarnation: int
    seq: FrameNumber
    started: tuple[Started, ...] = ()
    deltas: tuple[Delta, ...] = ()
    ended: tuple[Ended, ...] = ()

    @property
    def is_heartbeat(self) -> bool:
        return not (self.started or self.deltas or self.ended)


class CancelResponse(Message, frozen=True):
    """From another frontend: end a response that runs in the background here. The answer is Done, whether it still ran or not."""

    response_id: str


class SessionScope(Part, frozen=True):
    """Whose sessions: ``client``: the name of the API key, ``salt``: what keeps cached blocks apart."""

    client: str = ""
    salt: str = ""


class SessionLease(Part, frozen=True):
    """The first ``tokens`` of the session's last prompt are kept until then, unix seconds."""

    tokens: int
    expires_s: float


class SessionState(Part, frozen=True):
    """``blocks``: of the newest prompt with its answer; ``tiers``: how many of them lie in each tier, on the instance that has most
    (None: no indexer tells). ``prefetch_s``: when they are to be brought back, unix seconds."""

    id: str
    model: str
    created_s: float
    used_s: float
    parent: str = ""
    ephemeral: bool = False
    final: bool = False
    requests: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unpinned_tokens: int = 0
    worker_id: str = ""
    blocks: int = 0
    tiers: dict[str, int] | None = None
    leases: tuple[SessionLease, ...] = ()
    prefetch_s: float | None = None


class ListSessions(Message, frozen=True):
    """The sessions of this scope that the frontend has served, the newest first, of those used before ``before_s`` (0: all), or the
    one with this ``session_id``. The answer is a SessionList."""

    scope: SessionScope
    limit: int
    before_s: float = 0.0
    session_id: str = ""


class SessionList(Message, frozen=True):
    sessions: tuple[SessionState, ...] = ()
    has_more: bool = False


class ForgetSession(Message, frozen=True):
    """Somebody deletes it: forget it, and the ephemeral sessions below it. The answer is a ForgottenSession; the blocks are the
    asker's to drop."""

    scope: SessionScope
    session_id: str


class HeldChain(Part, frozen=True):
    """``keys``: of a whole chain, packed; its first ``kept`` blocks are needed by others."""

    model: str
    keys: bytes
    kept: int = 0


class ForgottenSession(Message, frozen=True):
    """``known``: whether it was. ``running``: so many requests of it still run here; what they hold goes when they end."""

    known: bool
    running: int = 0
    chains: tuple[HeldChain, ...] = ()


class WhoseBlocks(Message, frozen=True):
    """Of each chain (whole, packed): how much of it does a session of yours hold? The answer is HeldBlocks."""

    chains: tuple[bytes, ...]


class HeldBlocks(Message, frozen=True):
    """``counts``: leading blocks, per chain."""

    counts: tuple[int, ...]


class PrefetchSession(Message, frozen=True):
    """Bring back the blocks of a session that you know the last prompt of, by ``deadline_ms``. The answer is a SessionPrefetched;
    ``gone`` when it is not known."""

    scope: SessionScope
    session_id: str
    deadline_ms: int


class SessionPrefetched(Message, frozen=True):
    """``cached_tokens`` of the prompt lie in G1 of the worker now, ``onboarded_tokens`` of them were brought back."""

    model: str
    worker_id: str
    prompt_tokens: int
    cached_tokens: int
    onboarded_tokens: int = 0
