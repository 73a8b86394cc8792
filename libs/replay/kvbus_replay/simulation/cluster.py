"""Runs a trace: arrivals, routing, steps of the engines, events to the index, reports to the router, each when it is due.

What a bus does in life is a fixed delay here (`ClusterShape.hop_s`). Everything that decides is the real thing: the router's
`Dispatcher`, a `PrefixIndex`, the workers' `MockScheduler`, their `LoadPacing`, and the pools of kvbm where there is a host tier.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec

from kvbus_blocks.index import Owner, PrefixIndex
from kvbus_replay.simulation.clock import VirtualClock
from kvbus_replay.simulation.hints import Hints, Retention
from kvbus_replay.simulation.host_tier import HostShape, HostTier
from kvbus_replay.simulation.measures import CallRecords
from kvbus_replay.simulation.oracle import SharedCacheOracle
from kvbus_replay.simulation.sessions import OpenSessions
from kvbus_replay.simulation.workers import MODEL, SimulatedWorker, WorkerShape
from kvbus_replay.trace.calls import Call, Trace
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused, Settled
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import RoutingPolicy
from kvbus_wire.errors import ErrorReply
from kvbus_wire.frontend import Ended
from kvbus_wire.indexer import Match
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_keys, short_key, short_keys
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.router import RouteRequest
from kvbus_worker.engines.base import BlockEvent, BlocksRemoved, BlocksStored, DirectiveRun


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """``hop_s``: one message on the bus. ``events_s``: until a KV event is in the index. ``deadline_s``: of a call, from its
    arrival; ``max_retries``: how often a client comes back that was refused for the moment. ``max_repeats``: decode steps that are
    planned at once. ``retention``: see `Retention`.
    """

    workers: int = 64
    worker: WorkerShape = WorkerShape()
    host: HostShape = HostShape()
    hop_s: float = 0.001
    events_s: float = 0.005
    deadline_s: float = 1800.0
    max_retries: int = 100
    max_repeats: int = 64
    retention: Retention = "off"


class Running(msgspec.Struct):
    """A call on its way."""

    call: Call
    keys: list[bytes]
    packed: bytes
    arrived_s: float
    oracle_blocks: int
    retries: int = 0
    first_token_s: float | None = None
    queued_s: float = 0.0
    resumed: bool = False


class Cluster:
    """One run of one trace under one policy."""

    def __init__(
        self,
        trace: Trace,
        shape: ClusterShape,
        policy: RoutingPolicy,
        *,
        rng: Random,
        index: PrefixIndex,
        limits: Limits | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.records = CallRecords()
        self.oracle = SharedCacheOracle()
        self.last_end_s = 0.0
        self.index = index
        self.retention = shape.retention
        self._trace = trace
        self._shape = shape
        self._size = trace.block_size
        self.dispatcher = Dispatcher("replay", limits or Limits(), weights or Weights(), policy, rng)
        self._running: dict[str, Running] = {}
        self._news: deque[tuple[float, Owner, Sequence[BlockEvent | KvEvent]]] = deque()
        self._blockers: dict[str, int] = {}
        self._followers: dict[str, list[Call]] = {}
        self._hints = Hints(trace)
        self._sessions = OpenSessions()
        self.workers: dict[str, SimulatedWorker] = {}
        lru = shape.retention == "lru"
        self.hosts: list[HostTier] = []
        for number in range(shape.workers):
            if shape.host.g2_tokens and number % shape.host.workers == 0:
                host_id = f"host-{len(self.hosts):04}"
                self.hosts.append(HostTier(host_id, shape.host, self._size, self.clock, self.tier_changed, lru=lru))
                self.dispatcher.state.joined(self.hosts[-1].record)
            worker = SimulatedWorker(
                f"worker-{number:04}",
                shape.worker,
                self._size,
                self.clock,
                self,
                max_repeats=shape.max_repeats,
                tier=self.hosts[-1] if self.hosts else None,
                lru=lru,
            )
            self.workers[worker.worker_id] = worker
            self.dispatcher.state.joined(worker.record)

    def run(self) -> None:
        """Until every call has ended or failed."""
        for call in self._trace.calls:
            self._expect(call)
        self.clock.run()

    # -- the clients

    def _expect(self, call: Call) -> None:
        self._blockers[call.call_id] = len(call.after)
        for before in call.after:
            self._followers.setdefault(before, []).append(call)
        if not call.after:
            self._arrive_at(call.at_s, call)

    def _arrive_at(self, when_s: float, call: Call) -> None:
        self.clock.at(when_s, partial(self._arrive, call))

    def _arrive(self, call: Call) -> None:
        keys = call.chain.keys()
        prompt_keys = keys[: call.prompt_tokens // self._size]
        oracle = self.oracle.arrive(prompt_keys, (call.prompt_tokens - 1) // self._size)
        own_tokens = call.prompt_tokens + call.output_tokens - self._hints.head(call.session_id) * self._size
        resumed = self._sessions.grown(call.session_id, max(own_tokens, 0))
        self.records.working_set_tokens = self._sessions.peak_tokens
        running = Running(call, keys, pack_keys(prompt_keys), self.clock.now, oracle, resumed=resumed)
        self._running[call.call_id] = running
        self._route(running)

    def _over(self, call_id: str) -> None:
        """A call has ended or failed: those that waited for it go on."""
        over = self._running.pop(call_id).call
        if self._hints.is_last(over):
            self._sessions.ended(over.session_id)
        for call in self._followers.pop(call_id, ()):
            self._blockers[call.call_id] -= 1
            if not self._blockers[call.call_id]:
                del self._blockers[call.call_id]
                self._arrive_at(max(self.clock.now + call.pause_s, call.at_s), call)

    def _fail(self, running: Running, reason: str) -> None:
        self.records.fail(reason)
        self._over(running.call.call_id)

    # -- the router

    def _route(self, running: Running) -> None:
        now, call = self.clock.now, running.call
        self.hear_events(now)
        depths = self.index.match(short_keys(running.packed))
        matches = [Match(owner.instance_id, owner.tier, depth) for owner, depth in depths.items()]
        request = RouteRequest(
            request_id=call.call_id,
            model=MODEL,
            keys=running.packed,
            prompt_tokens=call.prompt_tokens,
            max_tokens=call.output_tokens,
            deadline_ms=0,
            hints=AgentHints(priority=call.priority, strict_priority=call.strict_priority),
            session=SessionRef(id=call.session_id, parent=call.parent_session_id, final=call.final),
            tenant=call.tenant,
        )
        deadline = running.arrived_s + self._shape.deadline_s
        outcome, settled = self.dispatcher.submit(request, matches, deadline, now)
        self._settle(settled)
        if isinstance(outcome, Queued):
            self.clock.at(deadline, self._pump)
        else:
            self._take(running, outcome)

    def _pump(self) -> None:
        if self.dispatcher.waiting:
            self._settle(self.dispatcher.pump(self.clock.now))

    def _settle(self, settled: Sequence[Settled]) -> None:
        for one in settled:
            self._take(self._running[one.request_id], one.outcome)

    def _take(self, running: Running, outcome: Placed | Refused) -> None:
        if isinstance(outcome, Refused):
            self._refused(running, outcome.reply)
            return
        running.queued_s += outcome.placement.queued_s
        worker = self.workers[outcome.placement.worker_id]
        said: tuple[DirectiveRun, ...] = ()
        if self.retention == "on":
            prompt_blocks = running.call.prompt_tokens // self._size
            said = self._hints.said(running.call, prompt_blocks, self.clock.now)
            session_id = running.call.session_id
            self._drop(session_id, self._sessions.replaced(session_id, running.keys, self._hints.head(session_id)))
            self._sessions.served(session_id, worker)
        self.clock.after(self._shape.hop_s, partial(worker.accept, running.call, running.keys, said))

    def _refused(self, running: Running, reply: ErrorReply) -> None:
        if not reply.retryable or running.retries >= self._shape.max_retries:
            self._fail(running, str(reply.code))
            return
        running.retries += 1
        self.records.retries += 1
        self.clock.after(reply.retry_after_s or 1.0, partial(self._route, running))

    # -- what the workers say

    def refused(self, call_id: str, reply: ErrorReply) -> None:
        self.dispatcher.finished(call_id)
        self._refused(self._running[call_id], reply)

    def blocks_changed(self, worker: SimulatedWorker, events: tuple[BlockEvent, ...]) -> None:
        self._news.append((self.clock.now + self._shape.events_s, worker.owner, events))

    def tier_changed(self, owner: Owner, events: Sequence[KvEvent]) -> None:
        self._news.append((self.clock.now + self._shape.events_s, owner, events))

    def hear_events(self, now: float) -> None:
        """What has reached the index by then. It is only applied when somebody asks the index."""
        news, index = self._news, self.index
        while news and news[0][0] <= now:
            _, owner, events = news.popleft()
            for event in events:
                match event:
                    case BlocksStored(parent, keys):
                        index.store(owner, short_key(parent) if parent else None, short_keys(pack_keys(keys)))
                    case BlocksRemoved(keys):
                        index.remove(owner, short_keys(pack_keys(keys)))
                    case Stored(parent, packed):
                        index.store(owner, short_key(parent) if parent else None, short_keys(packed))
                    case Removed(packed):
                        index.remove(owner, short_keys(packed))

    def first_token(self, call_id: str) -> None:
        running = self._running[call_id]
        running.first_token_s = self.clock.now
        self.clock.after(self._shape.hop_s, partial(self._first_token_heard, call_id))

    def _first_token_heard(self, call_id: str) -> None:
        self.dispatcher.first_token(call_id, self.clock.now)
        self._pump()

    def ended(self, ended: Ended) -> None:
        running, records, now = self._running[ended.request_id], self.records, self.clock.now
        call, usage = running.call, ended.usage
        first = running.first_token_s if running.first_token_s is not None else now
        records.arrived_s.append(running.arrived_s)
        records.ttft_s.append(first - running.arrived_s)
        records.total_s.append(now - running.arrived_s)
        records.router_queue_s.append(running.queued_s)
        records.engine_queue_s.append(usage.queue_s)
        records.prompt_tokens += call.prompt_tokens
        records.cached_tokens += usage.cached_tokens
        records.onboarded_tokens += usage.onboarded_tokens
        records.oracle_tokens += running.oracle_blocks * self._size
        records.output_tokens += usage.output_tokens
        if running.resumed:
            reusable = running.oracle_blocks * self._size
            records.resumed_ttft_s.append(first - running.arrived_s)
            records.resumed_tokens += reusable
            records.recomputed_tokens += max(0, reusable - usage.cached_tokens)
        if self.retention == "on" and self._hints.is_last(call):
            self._drop(call.session_id, running.keys[self._hints.head(call.session_id) :])
        self.last_end_s = now
        self.oracle.end(running.keys[call.prompt_tokens // self._size :])
        self.clock.after(self._shape.hop_s, partial(self._finished_heard, ended.request_id))
        self._over(ended.request_id)

    def _drop(self, session_id: str, keys: list[bytes]) -> None:
        """A session has ended, or has replaced its history: nobody asks for these blocks any more."""
        workers = self._sessions.workers(session_id) if keys else []
        for worker in workers:
            worker.drop(keys)
        for host in {id(worker.tier): worker.tier for worker in workers}.values():
            if host is not None:
                host.drop(keys)

    def _finished_heard(self, call_id: str) -> None:
        self.dispatcher.finished(call_id)
        self._pump()

    def step_ended(self, gap_s: float, tokens: int) -> None:
        self.records.inter_token_s.add(gap_s, tokens)

    def load_changed(self, report: LoadReport) -> None:
        self.clock.after(self._shape.hop_s, partial(self._report_heard, report))

    def _report_heard(self, report: LoadReport) -> None:
        self.dispatcher.state.load_report(report, self.clock.now)
        self._pump()
