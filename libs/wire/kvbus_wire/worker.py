"""Messages to a worker (and, of the control messages, to kvbm)."""

from kvbus_wire.guidance import Guidance
from kvbus_wire.message import Message, Part
from kvbus_wire.request import AgentHints, MockOutput, Retention, Sampling, SessionRef, Stopping


class RemotePrefill(Part, frozen=True):
    """Another worker that is to compute the prompt for the one that gets the request. ``tokens``: how many the router expects it to
    bring."""

    worker_id: str
    incarnation: int
    tokens: int


class Generate(Message, frozen=True):
    """Run a request. Idempotent: twice with one ``request_id`` runs once.

    The prompt is ``prefix_tokens`` tokens that end with the block ``prefix_key`` (the worker is believed to hold them), then
    ``tokens`` (packed). Its last ``resumed`` tokens are output that another worker produced before: they count for
    ``max_tokens``, penalties, seeds and guidance, and the first delta starts at that offset. Deltas go to the frontend's step
    subject. ``speculative``: it is only to have the prompt computed, nobody waits for what it says. ``tenant``: whose share of
    pinned blocks ``retention`` counts against. ``prefill``: who computes the prompt; the worker itself when that one cannot.
    """

    request_id: str
    model: str
    frontend_id: str
    tokens: bytes
    sampling: Sampling
    stopping: Stopping
    deadline_ms: int
    prefix_key: bytes = b""
    prefix_tokens: int = 0
    resumed: int = 0
    cache_salt: str = ""
    lora: str = ""
    hints: AgentHints = AgentHints()
    session: SessionRef | None = None
    retention: tuple[Retention, ...] = ()
    mock: MockOutput | None = None
    trace: str = ""
    guidance: Guidance | None = None
    speculative: bool = False
    tenant: str = ""
    prefill: RemotePrefill | None = None


class Prefetch(Message, frozen=True):
    """Bring the blocks of a prompt back into G1, from whichever tier, by ``deadline_ms``; nothing is computed. Fields as in
    Generate."""

    request_id: str
    model: str
    tokens: bytes
    deadline_ms: int
    prefix_key: bytes = b""
    prefix_tokens: int = 0
    cache_salt: str = ""
    lora: str = ""
    retention: tuple[Retention, ...] = ()
    tenant: str = ""


class Prefetched(Message, frozen=True):
    """How much of the prompt lies in G1 now, and how much of that was brought."""

    request_id: str
    cached_tokens: int
    onboarded_tokens: int = 0


class Accepted(Message, frozen=True):
    """The request runs (or has run); everything else arrives in step frames of this incarnation."""

    request_id: str
    incarnation: int


class NeedTokens(Message, frozen=True):
    """The prefix is gone: send Generate again with all tokens."""

    request_id: str


class Cancel(Message, frozen=True):
    """Idempotent; a running request ends with reason ``cancelled``."""

    request_id: str
    reason: str


class Done(Message, frozen=True):
    """A control message was carried out."""


class ReplaySteps(Message, frozen=True):
    """Send the step frames ``first_seq`` .. ``last_seq`` of this incarnation to the frontend again."""

    frontend_id: str
    incarnation: int
    first_seq: int
    last_seq: int


class ReplayedSteps(Message, frozen=True):
    """``frames``: encoded StepFrames. A range that left the ring is answered by an ErrorReply with code ``gone``."""

    frames: tuple[bytes, ...]


class SetRole(Message, frozen=True):
    """Be ``both``, ``prefill`` or ``decode`` from now on. What runs goes on to its end. The reply is Done, once the others can see
    it."""

    role: str


class Drain(Message, frozen=True):
    """Stop taking work, finish what runs, then end."""


class BlockSnapshot(Message, frozen=True):
    """Which blocks do you hold? Answered in chunks: ask again with ``cursor`` until ``next_cursor`` is None."""

    cursor: int = 0
    snapshot_id: str = ""


class SnapshotChain(Part, frozen=True):
    """``keys`` (packed) follow ``parent`` (empty: the root) one after the other, as in a Stored event."""

    parent: bytes
    keys: bytes


class BlockSnapshotChunk(Message, frozen=True):
    """``kv_seq``: the last event that the snapshot includes; later events apply on top of it."""

    snapshot_id: str
    instance_id: str
    incarnation: int
    model: str
    tier: str
    kv_seq: int
    chains: tuple[SnapshotChain, ...]
    next_cursor: int | None = None
