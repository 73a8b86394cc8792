"""Parts that ride with a request through every service."""

from kvbus_wire.message import Part

MOST_PRIORITY = 2.0**31


class AgentHints(Part, frozen=True):
    """What the harness knows about the request (``nvext.agent_hints``).

    ``priority``: higher is sooner; ``strict_priority``: an absolute tier in the router's queue; ``osl``: expected output tokens;
    ``latency_sensitivity``: above 0, the sooner its first token the better, whatever that costs others; also the older name of a
    priority, where no priority is given; ``speculative_prefill``: warm the cache for the next turn; ``input_trigger``: what the
    request answers: user, tool, or "" when nobody knows.
    """

    priority: int = 0
    strict_priority: int = 0
    osl: int | None = None
    latency_sensitivity: float | None = None
    speculative_prefill: bool = False
    input_trigger: str = ""

    @property
    def effective_priority(self) -> float:
        sensitivity = self.latency_sensitivity or 0.0
        return self.priority or max(-MOST_PRIORITY, min(sensitivity, MOST_PRIORITY))


class SessionRef(Part, frozen=True):
    """The agent session a request belongs to; ``final``: nothing follows in this session."""

    id: str
    parent: str | None = None
    final: bool = False
    ephemeral: bool = False


class Retention(Part, frozen=True):
    """How long the blocks of the prompt's tokens [``start``, ``end``) are worth keeping. ``end`` 0: to the end of the prompt.

    ``kind``: pinned (they stay for ``ttl_s``), normal, or ephemeral (the first to go). ``priority``: higher stays longer.
    """

    start: int = 0
    end: int = 0
    priority: int = 0
    ttl_s: float | None = None
    kind: str = "normal"


class Sampling(Part, frozen=True):
    """``temperature`` 0 is greedy; ``top_k`` 0 is off; ``logprobs`` None is off, 0 is the sampled token only.

    ``seed``: token i of the output is drawn from a generator keyed by (seed, i), so a migrated request draws the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class Stopping(Part, frozen=True):
    """When the engine ends by itself. ``max_tokens`` counts all output tokens, those of before a migration included.

    Stop strings are the frontend's: it alone turns tokens into text.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class MockOutput(Part, frozen=True):
    """What the mock engine shall say: raw model output, tokenised by the worker; refused by every other engine.

    ``chunks`` are pieces whose tokens are emitted in one step each (joined they are the output).
    """

    output: str = ""
    finish: str = "stop"
    chunks: tuple[str, ...] = ()
