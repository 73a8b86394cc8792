"""Messages to the router."""

from kvbus_wire.message import Message, Part
from kvbus_wire.request import AgentHints, SessionRef


class RouteRequest(Message, frozen=True):
    """Place a request. No tokens, no text: ``keys`` are the packed block keys of the whole blocks of the prompt.

    ``excluded``: workers that have failed this request already. ``deadline_ms``: unix milliseconds. Idempotent by ``request_id``:
    asking again moves the reservation.
    """

    request_id: str
    model: str
    keys: bytes
    prompt_tokens: int
    max_tokens: int
    deadline_ms: int
    hints: AgentHints = AgentHints()
    session: SessionRef | None = None
    tenant: str = ""
    pinned: str | None = None
    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


class Candidate(Part, frozen=True):
    """One worker's terms in a decision, for explanations. Times in seconds, sizes in tokens."""

    worker_id: str
    cost: float
    cached_tokens: int
    onboard_tokens: int
    waiting_tokens: int
    running: int


class Placement(Message, frozen=True):
    """``cached_tokens``: what the worker is believed to hold in G1; ``onboard_tokens``: what it can fetch beyond that."""

    request_id: str
    worker_id: str
    incarnation: int
    cached_tokens: int
    onboard_tokens: int
    policy: str
    queued_s: float = 0.0
    candidates: tuple[Candidate, ...] = ()


class Progress(Message, frozen=True):
    """A placed request moves on: ``phase`` is ``first_token`` or ``finished``. Finished ends its reservation."""

    request_id: str
    model: str
    phase: str
    output_tokens: int = 0


class Decision(Message, frozen=True):
    """A reservation made by one router, for its replicas."""

    router_id: str
    request_id: str
    model: str
    worker_id: str
    incarnation: int
    prompt_tokens: int
    uncached_tokens: int
    expected_output: int
    keys: bytes = b""
