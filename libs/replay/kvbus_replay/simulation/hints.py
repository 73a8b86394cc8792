"""What callers say of the future of their blocks, as harnesses do that mark their prompts and their sub-agents.

system prompt and tools of a session     a priority
the whole prompt                         pinned for five minutes, renewed with each call (a `cache_control` breakpoint at its end)
a call that a tool makes for itself      ephemeral
the end of a session                     its blocks are dropped, but what it shares with others
"""

from typing import Literal, get_args

from kvbus_blocks.retention import Directive
from kvbus_replay.trace.calls import Call, Trace
from kvbus_worker.engines.base import DirectiveRun

Retention = Literal["on", "off", "lru"]
"""``on``: callers say what they know; ``off``: they say nothing; ``lru``: nothing, and the least recently used goes first."""
RETENTIONS: tuple[Retention, ...] = get_args(Retention)

LEASE_S = 300.0
HEAD_PRIORITY = 50


class Hints:
    """Of all sessions of a trace. The head of a session is what its first prompt has in common with others."""

    def __init__(self, trace: Trace) -> None:
        self._heads: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._last: dict[str, str] = {}
        for call in trace.calls:
            self._heads.setdefault(call.session_id, call.chain.kept)
            self._first.setdefault(call.session_id, call.call_id)
            self._last[call.session_id] = call.call_id

    def head(self, session_id: str) -> int:
        """In blocks."""
        return self._heads[session_id]

    def is_last(self, call: Call) -> bool:
        """Nothing of its session follows."""
        return call.final or self._last[call.session_id] == call.call_id

    def is_side_call(self, call: Call) -> bool:
        """The first call of a session within another is its last."""
        return call.parent_session_id is not None and call.final and self._first[call.session_id] == call.call_id

    def said(self, call: Call, prompt_blocks: int, now_s: float) -> tuple[DirectiveRun, ...]:
        if self.is_side_call(call):
            return (DirectiveRun(0, None, Directive("ephemeral")),)
        head = min(self.head(call.session_id), prompt_blocks)
        lease = Directive("pinned", 0, now_s + LEASE_S, call.tenant)
        pinned = Directive("pinned", HEAD_PRIORITY, now_s + LEASE_S, call.tenant)
        runs = (DirectiveRun(0, head, pinned), DirectiveRun(head, prompt_blocks, lease))
        return tuple(run for run in runs if run.end is None or run.start < run.end)
