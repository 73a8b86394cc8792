"""The seam between the worker and a token engine.

An engine turns token ids into token ids and keeps KV blocks. It knows nothing of the bus, of text or of other workers. All methods
are called on the event loop's thread and must not block it; an engine that computes does so in a thread of its own and hands each
step's outcome to the sink on the loop.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started
from kvbus_wire.guidance import Guidance
from kvbus_wire.request import MockOutput, Sampling, Stopping


class EngineError(Exception):
    """The engine refuses or has failed; `reply` is what the requester gets."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
        param: str | None = None,
        **details: str | int | float,
    ) -> None:
        super().__init__(message)
        self.reply = ErrorReply(
            code=code, message=message, retryable=retryable, retry_after_s=retry_after_s, param=param, details=details
        )


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is. ``block_bytes``: size of one exported block, 0 when the engine cannot export. ``guidance``: it constrains
    output; it gets no request with guidance otherwise. ``kv_events``: it says which blocks it holds. ``handover``: it
    moves blocks to engines of the same kind itself, see `HandsOver` (empty: the worker does)."""

    name: str
    block_size: int
    total_blocks: int
    context_length: int
    max_num_seqs: int
    max_batched_tokens: int
    kv_layout: str
    block_bytes: int
    prefill_tokens_per_s: float
    decode_step_s: float
    guidance: bool = False
    kv_events: bool = True
    handover: str = ""


class DirectiveRun(msgspec.Struct, frozen=True):
    """What is said of the blocks [``start``, ``end``) of a chain. ``end`` None: of all that follows, output included. Times are
    those of `time.monotonic`."""

    start: int
    end: int | None
    directive: Directive


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens``: the whole prompt, its last ``resumed`` tokens being output of another worker.

    ``priority`` and ``strict_priority``: see `engines.ranking`. ``speculative``: nobody waits for what it says.
    ``domain_key`` seeds the block keys. ``guidance`` binds the output, what was resumed included.
    ``onboarded_tokens``: how many of the cached tokens the worker has just imported, reported back in Started and Usage.
    ``prefill_only``: another worker's, for its blocks; what it says is heard by nobody. ``handover``: see `HandsOver`.
    ``directives``: how long its blocks are worth keeping, in order and without overlaps; of blocks in between nothing is said.
    """

    request_id: str
    tokens: Sequence[int]
    domain_key: bytes
    sampling: Sampling
    stopping: Stopping
    resumed: int = 0
    priority: float = 0
    strict_priority: int = 0
    onboarded_tokens: int = 0
    mock: MockOutput | None = None
    guidance: Guidance | None = None
    speculative: bool = False
    prefill_only: bool = False
    handover: bytes = b""
    directives: tuple[DirectiveRun, ...] = ()


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks became reusable below ``parent`` (empty: the root); ``tokens[i]`` are the packed token ids of ``keys[i]``."""

    parent: bytes
    keys: tuple[bytes, ...]
    tokens: tuple[bytes, ...]


class BlocksRemoved(msgspec.Struct, frozen=True):
    keys: tuple[bytes, ...]


class BlocksCleared(msgspec.Struct, frozen=True):
    pass


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step produced, in order. A block event always precedes what depends on it. ``handovers``: (request id,
    payload), see `HandsOver`."""

    started: tuple[Started, ...] = ()
    deltas: tuple[Delta, ...] = ()
    ended: tuple[Ended, ...] = ()
    blocks: tuple[BlockEvent, ...] = ()
    handovers: tuple[tuple[str, bytes], ...] = ()


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """See LoadReport for the meaning of the fields. ``used_blocks``: blocks of running requests (cached ones are free to evict)."""

    running: int
    waiting: int
    waiting_tokens: int
    used_blocks: int
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float


StepSink = Callable[[StepOutput], None]


class Engine(Protocol):
    """One token engine. Each submitted request gets exactly one Started at most, and exactly one Ended, whatever happens."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self, sink: StepSink) -> None:
        """Load the model and become ready. Outcomes go to ``sink`` on the calling loop. Raise EngineError."""

    async def stop(self) -> None:
        """End all requests with reason ``cancelled``, then free everything. Idempotent."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raise EngineError (nothing is emitted then) for what cannot run: too long, unsupported, queue full.

        What takes longer to find out, such as whether a grammar can be followed, comes as an Ended with an error, before Started.
        """

    def cancel(self, request_id: str) -> None:
        """End a request with reason ``cancelled`` at the next step. Unknown ids are ignored."""

    def load(self) -> EngineLoad: ...

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of the chain lie in G1 now. A hint: they may be evicted before the request starts."""

    async def export_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Copy block ``keys[i]`` to ``into[i]`` (``block_bytes`` each); False where the block is gone. Never a torn copy."""

    async def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        data: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> int:
        """Make blocks reusable below ``parent``, which must be in G1 (or the root). ``tokens``: packed ids per block. ``said``:
        what holds for new ones from the beginning, before a request uses them (empty, None: nothing is said).

        Returns how many leading blocks are in G1 afterwards; takes only free or evictable room.
        BlocksStored is emitted for new ones.
        """

    def directives(self, keys: Sequence[bytes]) -> list[Directive]:
        """What holds for these blocks in G1 now (a pin beyond the tenant's share is none); the default for those that are not
        there."""

    async def touch(self, keys: Sequence[bytes], directives: Sequence[DirectiveRun]) -> int:
        """The leading blocks of a chain from the root on are used, though nothing is computed; how many are in G1."""

    async def drop_blocks(self, keys: Sequence[bytes]) -> int:
        """Evict these blocks now; how many. Those in use and those with others below them stay."""


@runtime_checkable
class HandsOver(Protocol):
    """An engine that moves the blocks of a remote prefill itself: disaggregated parameters, kv_transfer_params, a bootstrap room.

    The worker carries the payloads and looks into none:

        engine there                                   engine of the decode worker
                          <-- prefill_payload() ---    what it wants to say beforehand (may be empty)
        submit(prefill_only, handover)
        StepOutput.handovers  ------------------->     submit(handover): before anything is computed, where `handover_early`
                                                       says that both run at the same time, else when the prefill is done
    """

    handover_early: bool

    def prefill_payload(self, request: EngineRequest) -> bytes:
        """What the prefill of this request, which it gets afterwards, is to know. Raise EngineError."""
