"""One request inside the engine: its tokens, its blocks, how far it is, and when it ends. Pure."""

from array import array
from enum import Enum

import msgspec

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_wire.errors import ErrorReply
from kvbus_wire.frontend import Ended, Usage
from kvbus_wire.packing import pack_tokens
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.ranking import rank
from kvbus_worker.engines.said import Said


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class StopRule(msgspec.Struct, frozen=True):
    """``context_length`` bounds prompt and output together."""

    eos_token_ids: tuple[int, ...]
    context_length: int


class TokenSequence:
    """``tokens``: prompt and output so far; the KV of the first ``computed`` of them lies in the blocks ``table``.

    ``keys[i]`` names full block i; the first ``registered`` blocks of the table carry their key in the pool. ``output`` counts
    output tokens, those of before a migration included.
    """

    def __init__(self, request: EngineRequest, rule: StopRule, block_size: int, arrival: int, now_s: float) -> None:
        self.request = request
        self.id = request.request_id
        self.said = Said(request.directives)
        self.block_size = block_size
        self.tokens = array("I", request.tokens)
        self.prompt_tokens = len(self.tokens) - request.resumed
        self.output = request.resumed
        self.keys = chain_keys(request.domain_key, pack_tokens(self.tokens), block_size)
        self.table: list[int] = []
        self.computed = 0
        self.registered = 0
        self.state = State.WAITING
        self.rank = rank(request.priority, request.strict_priority, arrival, now_s)
        self.started = False
        self.cached_tokens = 0
        self.expected_hit = 0
        self.waits_for: bytes | None = None  # the block that another sequence was last seen to compute
        self._rule = rule
        stopping = request.stopping
        self.stop_ids = frozenset(stopping.stop_token_ids) | frozenset(
            () if stopping.ignore_eos else rule.eos_token_ids
        )
        self._arrived_s = now_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def reusable_blocks(self) -> int:
        """How many blocks may come from the cache: at least one token is left to compute, whose logits give the next one."""
        return (len(self.tokens) - 1) // self.block_size

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token."""
        return self.output >= self.request.stopping.min_tokens

    def key(self, index: int) -> bytes:
        """The key of full block ``index``; blocks of output get theirs here, in order."""
        while len(self.keys) <= index:
            start = len(self.keys) * self.block_size
            packed = pack_tokens(self.tokens[start : start + self.block_size])
            parent = self.keys[-1] if self.keys else ROOT
            self.keys += chain_keys(self.request.domain_key, packed, self.block_size, parent)
        return self.keys[index]

    def block_tokens(self, index: int) -> bytes:
        start = index * self.block_size
        return pack_tokens(self.tokens[start : start + self.block_size])

    def admit(self, cached_tokens: int, now_s: float) -> None:
        """Begin, or go on after a preemption (what is then found in the cache was computed here before)."""
        self.state = State.RUNNING
        self.computed = cached_tokens
        self.registered = len(self.table)
        if self._admitted_s is None:
            self._admitted_s = now_s
            self.cached_tokens = cached_tokens

    def append(self, token: int, now_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = now_s
        self.tokens.append(token)
        self.output += 1

    def is_full(self) -> bool:
        """Whether no further token may follow."""
        return self.output >= self.request.stopping.max_tokens or len(self.tokens) >= self._rule.context_length

    def ended(
        self, reason: str, now_s: float, *, stop_token_id: int | None = None, error: ErrorReply | None = None
    ) -> Ended:
        """The terminal event. Usage counts a migrated request's earlier output as output, never as prompt."""
        self.state = State.ENDED
        admitted_s = now_s if self._admitted_s is None else self._admitted_s
        first_s = now_s if self._first_token_s is None else self._first_token_s
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output,
            cached_tokens=min(self.cached_tokens, self.prompt_tokens),
            onboarded_tokens=min(self.request.onboarded_tokens, self.cached_tokens, self.prompt_tokens),
            queue_s=admitted_s - self._arrived_s,
            prefill_s=first_s - admitted_s,
        )
        return Ended(request_id=self.id, reason=reason, usage=usage, stop_token_id=stop_token_id, error=error)
