"""Messages to a frontend: what one engine step produced, in one message; and what other frontends want of it."""

from typing import Annotated

import msgspec

from kvbus_wire.errors import ErrorReply
from kvbus_wire.message import Message, Part

# Far beyond what is ever sent, and far enough below what msgpack can hold to be counted on from.
FrameNumber = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The engine began a request. ``cached_tokens`` were in G1, ``onboarded_tokens`` of them had been fetched from a lower
    tier. ``prefill_worker_id``: who computed the prompt (empty: the worker itself)."""

    request_id: str
    cached_tokens: int
    onboarded_tokens: int = 0
    prefill_worker_id: str = ""


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
