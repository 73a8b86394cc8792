"""The requests a worker has accepted and not ended, and the ids of those it ended lately."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, Usage
from kvbus_wire.packing import TOKEN_BYTES
from kvbus_worker.engines.base import EngineError


class OpenRequest(msgspec.Struct, kw_only=True):
    """``submitted``: the engine has it (before that, its blocks are being onboarded).

    ``to_pin``: blocks of the prompt that are to be pinned, by position; ``unpinned_below``: those of them that kvbm does not pin,
    None when it has not said.
    ``verdict``: why the worker ends it; the engine's own answer to the cancellation is then replaced by this error.
    """

    request_id: str
    frontend_id: str
    prompt_tokens: int
    resumed: int
    accepted_at: float
    trace: str = ""
    submitted: bool = False
    cancelled: bool = False
    verdict: ErrorReply | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    onboarded_tokens: int = 0
    first_token_at: float | None = None
    to_pin: tuple[tuple[int, bytes], ...] = ()
    unpinned_below: frozenset[bytes] | None = None


def unpinned(request: OpenRequest, in_g1: Sequence[Directive], cached_blocks: int) -> int:
    """How many of the blocks ``to_pin`` are pinned nowhere, as far as is known. ``in_g1``: what holds for them there.

    ``cached_blocks`` of its prompt were not computed. What kvbm has said holds for those only: it has not seen the others yet.
    """
    below = request.unpinned_below
    return sum(
        held.kind != "pinned" and (below is None or key in below or position >= cached_blocks)
        for (position, key), held in zip(request.to_pin, in_g1, strict=True)
    )


class RequestTable:
    """At most ``limit`` open requests and ``recent_limit`` remembered ids.

    A request that comes back with another ``resumed`` is a new attempt: it had migrated away and returns.
    """

    def __init__(self, *, limit: int, recent_limit: int) -> None:
        self._limit = limit
        self._recent_limit = recent_limit
        self._open: dict[str, OpenRequest] = {}
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    @property
    def recent(self) -> int:
        return len(self._recent)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._open)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Tokens that each of `ids` has said so far."""
        return tuple(request.output_tokens for request in self._open.values())

    @property
    def not_submitted(self) -> int:
        return sum(not request.submitted for request in self._open.values())

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def is_known(self, request_id: str, resumed: int) -> bool:
        """This attempt runs, or has run, here."""
        running = self._open.get(request_id)
        return (request_id, resumed) in self._recent or (running is not None and running.resumed == resumed)

    def check_room(self, request_id: str) -> None:
        """Raise EngineError when the request cannot be opened."""
        if request_id in self._open:
            raise EngineError(
                ErrorCode.UNAVAILABLE, "an earlier attempt of the request still runs here", retryable=True
            )
        if len(self._open) >= self._limit:
            raise EngineError(
                ErrorCode.OVERLOADED, "too many requests are open", retryable=True, max_requests=self._limit
            )

    def open(self, request: OpenRequest) -> None:
        self.check_room(request.request_id)
        self._open[request.request_id] = request

    def discard(self, request_id: str) -> None:
        """Forget a request that was never accepted."""
        self._open.pop(request_id, None)

    def condemn(self, request_id: str, verdict: ErrorReply | None) -> OpenRequest | None:
        """Mark for ending, with an error or as cancelled. None when there is nothing to do: unknown, or marked already."""
        request = self._open.get(request_id)
        if request is None or request.cancelled:
            return None
        request.cancelled = True
        request.verdict = verdict
        return request

    def of_frontend(self, frontend_id: str) -> list[OpenRequest]:
        return [request for request in self._open.values() if request.frontend_id == frontend_id]

    def frontends(self) -> set[str]:
        return {request.frontend_id for request in self._open.values()}

    def note_started(self, started: Started) -> OpenRequest | None:
        request = self._open.get(started.request_id)
        if request is not None:
            request.cached_tokens = started.cached_tokens
            request.onboarded_tokens = started.onboarded_tokens
        return request

    def note_delta(self, delta: Delta, now: float) -> OpenRequest | None:
        request = self._open.get(delta.request_id)
        if request is not None:
            request.output_tokens = delta.start + len(delta.tokens) // TOKEN_BYTES
            if request.first_token_at is None:
                request.first_token_at = now
        return request

    def end(self, ended: Ended) -> tuple[OpenRequest, Ended] | None:
        """Close a request. Its terminal event carries the worker's verdict if there is one; None for an unknown request."""
        request = self._open.pop(ended.request_id, None)
        if request is None:
            return None
        self._recent[request.request_id, request.resumed] = None
        while len(self._recent) > self._recent_limit:
            self._recent.popitem(last=False)
        if request.verdict is not None and ended.reason == "cancelled":
            ended = msgspec.structs.replace(ended, reason="error", error=request.verdict)
        return request, ended

    def end_by_worker(self, request: OpenRequest, error: ErrorReply | None) -> tuple[OpenRequest, Ended] | None:
        """Close a request without the engine's word."""
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            cached_tokens=min(request.cached_tokens, request.prompt_tokens),
            onboarded_tokens=min(request.onboarded_tokens, request.prompt_tokens),
        )
        reason = "cancelled" if error is None else "error"
        return self.end(Ended(request_id=request.request_id, reason=reason, usage=usage, error=error))
