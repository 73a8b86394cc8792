"""The router's accounting against a naive model: a list of placed requests, counted afresh each time."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_router.core.dispatcher import Dispatcher, Placed, Refused, Settled
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.news import Heard
from kvbus_router.core.policies import BUILT_IN
from kvbus_wire.errors import ErrorCode
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord
from kvbus_wire.request import AgentHints
from kvbus_wire.router import Decision, RouteRequest

MODEL = "m"
WORKERS = ("w0", "w1", "w2")
PER_WORKER, MAX_QUEUED, MAX_RESERVATIONS = 2, 2, 5
GRACE_S, WAIT_S = 5.0, 2.0

TOKENS = {f"r{i}": 40 * i + 10 for i in range(7)}

workers = st.sampled_from(WORKERS)
requests = st.sampled_from(list(TOKENS))


class ModelRequest:
    """A placed request as the model sees it. ``at_worker``: it has arrived there (else the worker cannot report it).
    ``decided``: when and by whom; ``own``: by the router under test."""

    def __init__(
        self, worker_id: str, uncached: int, at: float, decided: tuple[int, str] = (0, ""), own: bool = False
    ) -> None:
        self.decided = decided
        self.own = own
        self.worker_id = worker_id
        self.uncached = uncached
        self.at = at
        self.at_worker = False
        self.first_token = False
        self.listed = False


def record(worker_id: str, incarnation: int) -> InstanceRecord:
    card = ModelCard(name=MODEL, fingerprint="f", block_size=16, context_length=4096, bundle="b", kv_layout="l")
    return InstanceRecord(
        service="worker",
        instance_id=worker_id,
        incarnation=incarnation,
        host_id="h",
        version="1",
        started_ms=0,
        worker=WorkerRecord(
            model=card,
            engine="mock",
            total_blocks=100,
            max_num_seqs=4,
            max_batched_tokens=512,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
        ),
    )


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        limits = Limits(
            max_requests_per_worker=PER_WORKER,
            max_queued=MAX_QUEUED,
            max_reservations=MAX_RESERVATIONS,
            reservation_grace_s=GRACE_S,
            worker_wait_s=WAIT_S,
        )
        self.dispatcher = Dispatcher("router", limits, Weights(), BUILT_IN["kv"](), Random(1))
        self.now = 0.0
        self.incarnations = dict.fromkeys(WORKERS, 1)
        self.present: set[str] = set()
        self.placed: dict[str, ModelRequest] = {}
        self.waiting: dict[str, tuple[RouteRequest, float]] = {}
        self.made = 0
        self.over: set[str] = set()
        # By worker: requests that ended there since its last report, with the tokens that a report on its way would count.
        self.ended_since: dict[str, dict[str, int]] = {w: {} for w in WORKERS}
        # By worker: requests in its last report that nobody keeps account of.
        self.untracked = dict.fromkeys(WORKERS, 0)
        self.early: dict[tuple[str, str], tuple[Decision, float]] = {}
        self.last_report: dict[str, LoadReport] = {}
        self.seq = 0
        self.join("w0")

    def add(self, request_id: str, placed: ModelRequest) -> None:
        self.placed[request_id] = placed
        self.made += 1

    def release(self, request_id: str) -> None:
        placed = self.placed.pop(request_id, None)
        if placed is not None:
            self.ended_since[placed.worker_id][request_id] = 0 if placed.first_token else placed.uncached

    # -- the directory

    @rule(worker_id=workers)
    def join(self, worker_id: str) -> None:
        self.present.add(worker_id)
        for settled in self.dispatcher.joined(record(worker_id, self.incarnations[worker_id]), self.now):
            self.waiting.pop(settled.request_id)
        for key in [key for key in self.early if key[0] == worker_id]:
            self.hear(*self.early.pop(key))
        self.pump()

    @rule(worker_id=workers, told=st.booleans())
    def restart(self, worker_id: str, told: bool) -> None:
        """With or without the old record's end in between."""
        if worker_id not in self.present:
            return
        if told:
            self.dispatcher.state.left(record(worker_id, self.incarnations[worker_id]))
        self.incarnations[worker_id] += 1
        self.forget(worker_id)
        self.join(worker_id)

    @rule(worker_id=workers)
    def leave(self, worker_id: str) -> None:
        self.present.discard(worker_id)
        self.dispatcher.state.left(record(worker_id, self.incarnations[worker_id]))
        self.forget(worker_id)
        self.pump()

    def forget(self, worker_id: str) -> None:
        self.placed = {r: p for r, p in self.placed.items() if p.worker_id != worker_id}
        self.ended_since[worker_id].clear()
        self.untracked[worker_id] = 0
        self.last_report.pop(worker_id, None)

    # -- requests

    @rule(
        request_id=requests,
        strict=st.integers(0, 2),
        tenant=st.sampled_from(["", "a", "b"]),
        pinned=st.none() | workers,
        excluded=st.sets(workers, max_size=3),
        patience=st.floats(0.0, 10.0),
    )
    def route(
        self,
        request_id: str,
        strict: int,
        tenant: str,
        pinned: str | None,
        excluded: set[str],
        patience: float,
    ) -> None:
        request = RouteRequest(
            request_id=request_id,
            model=MODEL,
            keys=b"",
            prompt_tokens=TOKENS[request_id],
            max_tokens=5,
            deadline_ms=0,
            hints=AgentHints(strict_priority=strict),
            tenant=tenant,
            pinned=pinned,
            excluded=tuple(sorted(excluded)),
        )
        self.release(request_id)
        self.waiting.pop(request_id, None)
        self.over.discard(request_id)
        self.early = {key: decision for key, decision in self.early.items() if key[1] != request_id}
        may_run = self.may_run(request)
        deadline = self.now + patience
        outcome, settled = self.dispatcher.submit(request, (), deadline, self.now)
        for one in settled:
            if one.request_id != request_id:
                self.settle(one)
        match outcome:
            case Placed():
                self.place(request, outcome)
            case Refused(reply=reply):
                match reply.code:
                    case ErrorCode.DEADLINE_EXCEEDED:
                        assert deadline <= self.now
                    case ErrorCode.NO_WORKERS:
                        assert pinned is not None
                        assert not may_run
                    case ErrorCode.OVERLOADED:
                        assert len(self.waiting) == MAX_QUEUED or len(self.placed) == MAX_RESERVATIONS
                    case _:
                        raise AssertionError(reply.code)
            case _:
                self.waiting[request_id] = (request, deadline)

    @rule(request_id=requests)
    def finish(self, request_id: str) -> None:
        known = request_id in self.placed or request_id in self.waiting
        assert self.dispatcher.finished(request_id) == known
        self.over.add(request_id)
        self.release(request_id)
        self.waiting.pop(request_id, None)
        self.pump()

    @rule(request_id=requests)
    def first_token(self, request_id: str) -> None:
        if request_id in self.placed:
            self.placed[request_id].first_token = True
            self.placed[request_id].at_worker = True
        self.dispatcher.state.first_token(request_id, self.now)

    @rule(
        request_id=requests, worker_id=workers, stale=st.booleans(), ms=st.integers(0, 1), router=st.sampled_from("az")
    )
    def replica_places(self, request_id: str, worker_id: str, stale: bool, ms: int, router: str) -> None:
        decision = Decision(
            router_id=router,
            request_id=request_id,
            model=MODEL,
            worker_id=worker_id,
            incarnation=self.incarnations[worker_id] - stale,
            prompt_tokens=TOKENS[request_id],
            uncached_tokens=TOKENS[request_id],
            expected_output=5,
            decided_ms=ms,
        )
        heard, settled = self.dispatcher.apply_decision(decision, self.now)
        assert [one.request_id for one in settled] == ([request_id] if request_id in self.waiting else [])
        self.waiting.pop(request_id, None)
        assert heard is self.hear(decision, self.now)
        self.pump()

    def hear(self, decision: Decision, at: float) -> Heard:
        """``at``: when it came, which may be before its worker was known."""
        worker_id, request_id = decision.worker_id, decision.request_id
        if request_id in self.over:
            return Heard.ENDED
        if worker_id not in self.present:
            self.early.pop((worker_id, request_id), None)
            self.early[worker_id, request_id] = decision, at
            return Heard.EARLY
        if decision.incarnation < self.incarnations[worker_id]:
            return Heard.OLD_INCARNATION
        known, decided = self.placed.get(request_id), (decision.decided_ms, decision.router_id)
        if known is None and len(self.placed) == MAX_RESERVATIONS:
            return Heard.FULL
        if known is not None and known.worker_id == worker_id:
            if known.own or known.decided == decided:
                return Heard.KNOWN
            known.decided = decided
            if not known.listed:
                known.uncached = TOKENS[request_id]
            return Heard.APPLIED
        if known is not None and (known.listed or decided < known.decided):
            return Heard.SUPERSEDED
        self.release(request_id)
        self.add(request_id, ModelRequest(worker_id, TOKENS[request_id], at, decided))
        self.ended_since[worker_id].pop(request_id, None)
        return Heard.APPLIED

    # -- reports and time

    @rule(
        worker_id=workers,
        arrived=st.booleans(),
        loses=st.sets(requests, max_size=1),
        strangers=st.sets(requests, max_size=2),
        late=st.booleans(),
    )
    def report(self, worker_id: str, arrived: bool, loses: set[str], strangers: set[str], late: bool) -> None:
        """What the worker knows of, exactly. ``loses``: requests that have ended there without anybody telling; ``strangers``: that
        the router may not know of; ``late``: it was made before the ends that were told since the last one."""
        if worker_id not in self.present:
            return
        here = {r: p for r, p in self.placed.items() if p.worker_id == worker_id}
        for placed in here.values():
            placed.at_worker = placed.at_worker or arrived
        listed = {r: p for r, p in here.items() if p.at_worker and r not in loses}
        ended = dict(self.ended_since[worker_id]) if late else {}
        strangers = strangers - here.keys() - self.ended_since[worker_id].keys()
        self.seq += 1
        message = LoadReport(
            instance_id=worker_id,
            incarnation=self.incarnations[worker_id],
            model=MODEL,
            running=sum(p.first_token for p in listed.values()) + len(strangers),
            waiting=sum(not p.first_token for p in listed.values()) + len(ended),
            waiting_tokens=sum(p.uncached for p in listed.values() if not p.first_token) + sum(ended.values()),
            used_blocks=0,
            total_blocks=100,
            kv_seq=0,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
            request_ids=(*listed, *ended, *sorted(strangers)),
            seq=self.seq,
        )
        heard, settled = self.dispatcher.load_report(message, self.now)
        assert heard is Heard.APPLIED
        self.last_report[worker_id] = message
        self.ended_since[worker_id].clear()
        self.untracked[worker_id] = 0
        for request_id, placed in here.items():
            if request_id in listed:
                placed.listed = True
            elif placed.listed or self.now - placed.at > GRACE_S:
                del self.placed[request_id]
        for request_id in sorted(strangers):
            self.adopt(worker_id, request_id)
        assert {one.request_id for one in settled} == self.waiting.keys() & self.placed.keys()
        for one in settled:
            del self.waiting[one.request_id]
        self.pump()

    def adopt(self, worker_id: str, request_id: str) -> None:
        elsewhere = self.placed.get(request_id)
        if (elsewhere is None and len(self.placed) == MAX_RESERVATIONS) or (elsewhere is not None and elsewhere.listed):
            self.untracked[worker_id] += 1
            return
        self.release(request_id)
        adopted = ModelRequest(worker_id, 0, self.now)
        adopted.at_worker = adopted.listed = True
        self.add(request_id, adopted)

    @rule(worker_id=workers)
    def an_old_report_comes_again(self, worker_id: str) -> None:
        if worker_id in self.last_report:
            assert self.dispatcher.load_report(self.last_report[worker_id], self.now) == (Heard.REORDERED, [])

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    def pump(self) -> None:
        for settled in self.dispatcher.pump(self.now):
            self.settle(settled)

    def settle(self, settled: Settled) -> None:
        request, deadline = self.waiting.pop(settled.request_id)
        match settled.outcome:
            case Placed():
                assert self.now < deadline
                self.place(request, settled.outcome)
            case Refused(reply=reply):
                if reply.code is ErrorCode.DEADLINE_EXCEEDED:
                    assert deadline <= self.now
                else:
                    assert reply.code is ErrorCode.NO_WORKERS
                    assert not self.may_run(request)

    def place(self, request: RouteRequest, placed: Placed) -> None:
        worker_id = placed.placement.worker_id
        assert worker_id in self.may_run(request)
        assert placed.placement.incarnation == self.incarnations[worker_id]
        own = ModelRequest(worker_id, request.prompt_tokens, self.now, (0, "router"), own=True)
        self.add(request.request_id, own)
        self.ended_since[worker_id].pop(request.request_id, None)

    def may_run(self, request: RouteRequest) -> set[str]:
        allowed = {request.pinned} if request.pinned else set(WORKERS)
        return (self.present & allowed) - set(request.excluded)

    # -- what must hold

    @invariant()
    def load_is_what_is_placed(self) -> None:
        self.dispatcher.check_integrity()
        assert self.dispatcher.state.reservations == len(self.placed)
        for worker_id in self.present:
            worker = self.dispatcher.state.worker(worker_id)
            assert worker is not None
            here = [p for p in self.placed.values() if p.worker_id == worker_id]
            assert worker.totals.active == len(here) + self.untracked[worker_id]
            assert worker.totals.waiting_tokens == sum(p.uncached for p in here if not p.first_token)
            assert worker.totals.running <= len(here) + self.untracked[worker_id]

    @invariant()
    def every_reservation_ends_exactly_once(self) -> None:
        assert self.made == len(self.placed) + sum(self.dispatcher.state.endings.values())

    @invariant()
    def nobody_waits_while_a_worker_has_room(self) -> None:
        assert self.dispatcher.waiting == len(self.waiting)
        if len(self.placed) >= MAX_RESERVATIONS:
            return
        for request, _ in self.waiting.values():
            for worker_id in self.may_run(request):
                here = sum(p.worker_id == worker_id for p in self.placed.values())
                assert here + self.untracked[worker_id] >= PER_WORKER


TestRouterAgainstTheModel = RouterMachine.TestCase
TestRouterAgainstTheModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
