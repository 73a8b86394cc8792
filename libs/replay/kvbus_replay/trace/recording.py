"""Makes a trace of what passes on the bus: placements with their block keys, ends of requests, blocks that workers store.

Nothing of a request is known but lengths and keys, so its session is told from its keys: a prompt that begins with all of an
earlier prompt continues that session. The keys become hashes under a secret of this recording, which is forgotten with it: the same
prompt looks different in each recording, and nobody can look up a guessed text in one.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_replay.trace.agent_format import FORMAT_VERSION, CallLine, Header
from kvbus_wire.kv_events import KvEvents, Stored
from kvbus_wire.packing import unpack_keys
from kvbus_wire.router import Decision, Progress

_HASH_BYTES = 8


class RecordingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered; the oldest is forgotten first. ``open_calls``: calls without an end; ``blocks``: of known sessions, once
    for each; ``links``: stored blocks, to find those of an output. ``settle_s``: how long after its end a call waits for events."""

    open_calls: int = 10_000
    blocks: int = 4_000_000
    links: int = 1_000_000
    settle_s: float = 1.0


class RecordingCounts(msgspec.Struct):
    """``unfinished``: calls whose end was never heard; ``without_keys``: placements that did not carry their keys."""

    calls: int = 0
    unfinished: int = 0
    without_keys: int = 0


class _Open(msgspec.Struct):
    decision: Decision
    at_s: float
    order: int
    output_tokens: int = 0
    ended_at_s: float | None = None


class _Session(msgspec.Struct):
    """``hashes``: of its newest call, output included; ``prompt_blocks`` of them belong to the prompt."""

    name: str
    hashes: list[int]
    prompt_blocks: int
    last_call: str
    ended_at_s: float


class Recorder:
    """Fed with messages and the time, in seconds since the recording began; `take` has the lines that are complete."""

    def __init__(self, model: str, block_size: int, secret: bytes, limits: RecordingLimits) -> None:
        self.counts = RecordingCounts()
        self._model = model
        self._block_size = block_size
        self._secret = secret
        self._limits = limits
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._ended: deque[_Open] = deque()
        # What a worker stored below a block, as long as that was the same each time; None: several, as below a system prompt.
        self._links: OrderedDict[tuple[str, bytes], bytes | None] = OrderedDict()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._holder: dict[int, str] = {}
        self._blocks = 0
        self._placed = 0

    @property
    def header(self) -> Header:
        return Header(version=FORMAT_VERSION, block_size=self._block_size, source="kvbus trace record")

    def placed(self, decision: Decision, now_s: float) -> None:
        if decision.model != self._model or decision.request_id in self._open:
            return  # a request that migrates is placed again
        if not decision.keys and decision.prompt_tokens >= self._block_size:
            self.counts.without_keys += 1
            return
        self._open[decision.request_id] = _Open(decision, now_s, self._placed)
        self._placed += 1
        while len(self._open) > self._limits.open_calls:
            self._open.popitem(last=False)
            self.counts.unfinished += 1

    def progress(self, progress: Progress, now_s: float) -> None:
        if progress.phase != "finished":
            return
        call = self._open.pop(progress.request_id, None)
        if call is not None:
            call.output_tokens, call.ended_at_s = max(progress.output_tokens, 1), now_s
            self._ended.append(call)

    def stored(self, events: KvEvents) -> None:
        """Blocks in device memory, from which the blocks of outputs are found."""
        if events.model != self._model or events.tier != "g1":
            return
        for event in events.events:
            if isinstance(event, Stored):
                parent = event.parent
                for key in unpack_keys(event.keys):
                    self._link(events.instance_id, parent, key)
                    parent = key

    def take(self, now_s: float) -> Iterator[CallLine]:
        """Calls that ended long enough ago, in the order in which they ended."""
        while self._ended and (self._ended[0].ended_at_s or 0.0) + self._limits.settle_s <= now_s:
            yield self._line(self._ended.popleft())

    def take_all(self) -> Iterator[CallLine]:
        """The recording is over; calls that have not ended are left out."""
        yield from self.take(float("inf"))
        self.counts.unfinished += len(self._open)
        self._open.clear()

    def _link(self, worker_id: str, parent: bytes, key: bytes) -> None:
        place = (worker_id, parent)
        self._links[place] = key if self._links.get(place, key) == key else None
        while len(self._links) > self._limits.links:
            self._links.popitem(last=False)

    def _output_keys(self, call: _Open, prompt_keys: Sequence[bytes]) -> list[bytes]:
        """The blocks that the worker stored behind the prompt, as far as there is no doubt."""
        decision = call.decision
        most = (decision.prompt_tokens + call.output_tokens) // self._block_size - len(prompt_keys)
        above = prompt_keys[-1] if prompt_keys else ROOT
        keys: list[bytes] = []
        while len(keys) < most:
            child = self._links.get((decision.worker_id, above))
            if child is None:
                break
            above = child
            keys.append(above)
        return keys

    def _line(self, call: _Open) -> CallLine:
        decision = call.decision
        # Keys of a partial last block there are none.
        prompt_keys = unpack_keys(decision.keys)[: decision.prompt_tokens // self._block_size]
        hashes = [self._hash(key) for key in prompt_keys]
        output = [self._hash(key) for key in self._output_keys(call, prompt_keys)]
        base, keep = self._longest(hashes)
        continues = base is not None and keep >= base.prompt_blocks > 0 and base.ended_at_s <= call.at_s
        call_id = f"c{call.order}"
        session, pause_s = f"s{call.order}", 0.0
        after: tuple[str, ...] = ()
        if base is not None and continues:
            session, after, pause_s = base.name, (base.last_call,), call.at_s - base.ended_at_s
        line = CallLine(
            id=call_id,
            session=session,
            prompt_tokens=decision.prompt_tokens,
            output_tokens=call.output_tokens,
            base="" if base is None else base.name,
            keep=keep,
            hashes=hashes[keep:],
            output_hashes=output,
            at_s=0.0 if continues else round(call.at_s, 6),
            after=after,
            pause_s=round(pause_s, 6),
            trigger="tool" if continues else "user",
            tenant=f"t{self._hash(decision.tenant.encode()):016x}" if decision.tenant else "",
        )
        self._remember(_Session(session, hashes + output, len(hashes), call_id, call.ended_at_s or 0.0))
        self.counts.calls += 1
        return line

    def _hash(self, name: bytes) -> int:
        """Of a key or a tenant."""
        return int.from_bytes(blake2b(name, digest_size=_HASH_BYTES, key=self._secret).digest(), "little")

    def _longest(self, hashes: Sequence[int]) -> tuple[_Session | None, int]:
        """The session that shares most leading blocks, and how many. A known block implies that its prefix is known."""
        known = bisect_left(hashes, True, key=lambda block: block not in self._holder)
        if not known:
            return None, 0
        session = self._sessions[self._holder[hashes[known - 1]]]
        return session, known

    def _remember(self, session: _Session) -> None:
        """Each block belongs to the newest session that has it, so forgetting the oldest forgets what nobody used since."""
        before = self._sessions.pop(session.name, None)
        if before is not None:
            self._forget(before, keep=session.hashes)
        if not session.hashes:
            return  # nothing can continue it
        self._sessions[session.name] = session
        self._blocks += len(session.hashes)
        self._holder.update(dict.fromkeys(session.hashes, session.name))
        while self._blocks > self._limits.blocks and len(self._sessions) > 1:
            _, oldest = self._sessions.popitem(last=False)
            self._forget(oldest, keep=())

    def _forget(self, session: _Session, keep: Sequence[int]) -> None:
        self._blocks -= len(session.hashes)
        staying = set(keep)
        for block in session.hashes:
            if block not in staying and self._holder.get(block) == session.name:
                del self._holder[block]
