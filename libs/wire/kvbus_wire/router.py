"""Messages to the router."""

from kvbus_wire.message import Message, Part
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.worker import RemotePrefill


class RouteRequest(Message, frozen=True):
    """Place a request. No tokens, no text: ``keys`` are the packed block keys of the whole blocks of the prompt.

    ``excluded``: workers that have failed this request already. ``deadline_ms``: unix milliseconds. Idempotent by ``request_id``:
    asking again moves the reservation. ``required_taints``: only workers that have all of them; ``preferred_taints``: the cost of a
    worker that has the taint is multiplied by this factor (below 1: preferred). ``explain``: the placement shall say why.
    ``pinned``: the worker that has to serve it; ``prefill_pinned``: the one that has to compute its prompt, if it can.
    ``tenant``: who shares turns and limits; ``speculative``: not worth waiting for, so it is placed at once or refused.
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
    prefill_pinned: str | None = None
    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    required_taints: tuple[str, ...] = ()
    preferred_taints: dict[str, float] = {}
    explain: bool = False
    speculative: bool = False


class OnboardTerm(Part, frozen=True):
    """Tokens that the worker would fetch, in this time. ``source``: the tier (``g2`` .. ``g4``) or ``remote`` (another worker)."""

    source: str
    tokens: int
    seconds: float


class WorkerTerms(Part, frozen=True):
    """One worker's terms in a decision.

    ``verdict``: why the worker could not take the request; empty when it could. ``cost_s`` = (``wait_s`` + onboarding +
    ``prefill_s`` + ``work_s`` + ``decode_s``) * ``taint_factor`` - ``affinity_s``; the first three are the predicted TTFT.
    """

    worker_id: str
    verdict: str = ""
    cost_s: float = 0.0
    ttft_s: float = 0.0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    work_s: float = 0.0
    decode_s: float = 0.0
    affinity_s: float = 0.0
    taint_factor: float = 1.0
    cached_tokens: int = 0
    inflight_tokens: int = 0
    onboard: tuple[OnboardTerm, ...] = ()
    uncached_tokens: int = 0
    waiting_tokens: int = 0
    active: int = 0
    running: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


class PrefillTerms(Part, frozen=True):
    """A worker that could compute the prompt for the chosen one. ``verdict``: why not; empty when it could. ``ready_s``: predicted
    time until the chosen one has the blocks; ``local_s``: until it would have computed them itself. ``cost_s`` and
    ``local_cost_s`` count what that does to others, too; the lower one wins."""

    worker_id: str
    verdict: str = ""
    cost_s: float = 0.0
    local_cost_s: float = 0.0
    ready_s: float = 0.0
    local_s: float = 0.0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    cached_tokens: int = 0
    tokens: int = 0


class RouteExplanation(Message, frozen=True):
    """Why a request went, or would go, where it did: the workers by cost, then those that could not take it, at most as many as the
    router's settings say (``left_out``: so many more). ``worker_id``: the chosen one; empty when nothing was placed.
    ``ttft_s``: from the placement to the first token, once it was there. ``policy_class``, ``tenant``: in whose share it runs, or
    waited for its turn. ``prefill``: who was asked to compute the prompt, the best first; ``prefill_worker_id``: who does (empty:
    the worker itself).
    """

    request_id: str
    router_id: str
    model: str
    policy: str
    prompt_tokens: int
    worker_id: str = ""
    queued_s: float = 0.0
    ttft_s: float | None = None
    session_worker_id: str = ""
    workers: tuple[WorkerTerms, ...] = ()
    left_out: int = 0
    policy_class: str = ""
    tenant: str = ""
    prefill_worker_id: str = ""
    prefill: tuple[PrefillTerms, ...] = ()


class Placement(Message, frozen=True):
    """``cached_tokens``: what the worker is believed to hold in G1; ``onboard_tokens``: what it can fetch beyond that.
    ``explanation``: where the request asked for it. ``prefill``: who computes the prompt (None: the worker itself)."""

    request_id: str
    worker_id: str
    incarnation: int
    cached_tokens: int
    onboard_tokens: int
    policy: str
    queued_s: float = 0.0
    explanation: RouteExplanation | None = None
    prefill: RemotePrefill | None = None


class Progress(Message, frozen=True):
    """A placed request moves on: ``phase`` is ``first_token`` or ``finished``. Finished ends its reservation."""

    request_id: str
    model: str
    phase: str
    output_tokens: int = 0


class Decision(Message, frozen=True):
    """A reservation made by one router, for its replicas. ``session_id``, ``tenant``: whose next requests should find the worker
    (empty: nobody's); of two decisions on one session the later (``decided_ms``: unix milliseconds) counts. ``policy_class``,
    ``tenant``: in whose share it runs.
    ``prefill_tokens``: so many of the prompt are computed by ``prefill_worker_id``, and not by the worker."""

    router_id: str
    request_id: str
    model: str
    worker_id: str
    incarnation: int
    prompt_tokens: int
    uncached_tokens: int
    expected_output: int
    keys: bytes = b""
    session_id: str = ""
    tenant: str = ""
    decided_ms: int = 0
    policy_class: str = ""
    prefill_worker_id: str = ""
    prefill_tokens: int = 0


class ExplainRoute(Message, frozen=True):
    """What would become of this request now? Nothing is placed. The reply is a RouteExplanation."""

    request: RouteRequest


class ExplainPlaced(Message, frozen=True):
    """Why did this request go where it did? The reply is a RouteExplanation; ``gone`` when this router does not know (any more)."""

    request_id: str


class WorkerLimits(Part, frozen=True):
    """Limits of all workers that can be changed at run time; None: as the router's settings say. A worker that is at one of them
    gets nothing new until it is below again. The settings explain each. ``cordoned``: workers that get nothing new at all.
    """

    max_requests_per_worker: int | None = None
    worker_limit_factor: float | None = None
    busy_used_blocks_share: float | None = None
    busy_waiting_tokens: int | None = None
    cordoned: tuple[str, ...] | None = None


class GetLimits(Message, frozen=True):
    """The reply is RouterLimits."""


class SetLimits(Message, frozen=True):
    """Change the limits of all routers, and of those that start later. ``limits``: those given change; ``reset``: those named
    become what the settings say; ``cordon``, ``uncordon``: workers. The reply is RouterLimits, once they are stored."""

    limits: WorkerLimits = WorkerLimits()
    reset: tuple[str, ...] = ()
    cordon: tuple[str, ...] = ()
    uncordon: tuple[str, ...] = ()


class RouterLimits(Message, frozen=True):
    """What is in force at a router. ``revision``: of the stored changes that it has (0: there are none)."""

    router_id: str
    revision: int
    in_force: WorkerLimits
    stored: WorkerLimits = WorkerLimits()


class StoredLimits(Message, frozen=True):
    """The entry of the bucket that all routers follow."""

    limits: WorkerLimits
