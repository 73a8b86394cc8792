"""The router's accounting against a naive model: a list of placed requests, counted afresh each time."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_router.core.dispatcher import Dispatcher, Placed, Refused, Settled
from kvbus_router.core.limits import Limits, Weights
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

workers = st.sampled_from(WORKERS)
requests = st.sampled_from([f"r{i}" for i in range(7)])


class ModelRequest:
    """A placed request as the model sees it. ``at_worker``: it has arrived there (else the worker cannot report it)."""

    def __init__(self, worker_id: str, uncached: int, at: float) -> None:
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
        self.join("w0")

    # -- the directory

    @rule(worker_id=workers)
    def join(self, worker_id: str) -> None:
        self.present.add(worker_id)
        self.dispatcher.state.joined(record(worker_id, self.incarnations[worker_id]))
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

    # -- requests

    @rule(
        request_id=requests,
        tokens=st.integers(1, 500),
        strict=st.integers(0, 2),
        tenant=st.sampled_from(["", "a", "b"]),
        pinned=st.none() | workers,
        excluded=st.sets(workers, max_size=3),
        patience=st.floats(0.0, 10.0),
    )
    def route(
        self,
        request_id: str,
        tokens: int,
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
            prompt_tokens=tokens,
            max_tokens=5,
            deadline_ms=0,
            hints=AgentHints(strict_priority=strict),
            tenant=tenant,
            pinned=pinned,
            excluded=tuple(sorted(excluded)),
        )
        self.placed.pop(request_id, None)
        self.waiting.pop(request_id, None)
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
        self.placed.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self.pump()

    @rule(request_id=requests)
    def first_token(self, request_id: str) -> None:
        if request_id in self.placed:
            self.placed[request_id].first_token = True
            self.placed[request_id].at_worker = True
        self.dispatcher.state.first_token(request_id, self.now)

    @rule(request_id=requests, worker_id=workers, stale=st.booleans())
    def replica_places(self, request_id: str, worker_id: str, stale: bool) -> None:
        incarnation = self.incarnations[worker_id] - stale
        decision = Decision(
            router_id="replica",
            request_id=request_id,
            model=MODEL,
            worker_id=worker_id,
            incarnation=incarnation,
            prompt_tokens=50,
            uncached_tokens=30,
            expected_output=5,
        )
        fits = request_id in self.placed or len(self.placed) < MAX_RESERVATIONS
        expected = worker_id in self.present and not stale and fits
        applied, settled = self.dispatcher.apply_decision(decision, self.now)
        assert applied == expected
        assert [one.request_id for one in settled] == ([request_id] if request_id in self.waiting else [])
        self.waiting.pop(request_id, None)
        if expected:
            self.placed[request_id] = ModelRequest(worker_id, 30, self.now)
        self.pump()

    # -- reports and time

    @rule(worker_id=workers, arrived=st.booleans(), loses=st.sets(requests, max_size=1))
    def report(self, worker_id: str, arrived: bool, loses: set[str]) -> None:
        """What the worker knows of, exactly; ``loses``: requests that have ended there without anybody telling."""
        if worker_id not in self.present:
            return
        here = {r: p for r, p in self.placed.items() if p.worker_id == worker_id}
        for placed in here.values():
            placed.at_worker = placed.at_worker or arrived
        listed = {r: p for r, p in here.items() if p.at_worker and r not in loses}
        message = LoadReport(
            instance_id=worker_id,
            incarnation=self.incarnations[worker_id],
            model=MODEL,
            running=sum(p.first_token for p in listed.values()),
            waiting=sum(not p.first_token for p in listed.values()),
            waiting_tokens=sum(p.uncached for p in listed.values() if not p.first_token),
            used_blocks=0,
            total_blocks=100,
            kv_seq=0,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
            request_ids=tuple(listed),
        )
        assert self.dispatcher.state.load_report(message, self.now)
        for request_id, placed in here.items():
            if request_id in listed:
                placed.listed = True
            elif placed.listed or self.now - placed.at > GRACE_S:
                del self.placed[request_id]
        self.pump()

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
        self.placed[request.request_id] = ModelRequest(worker_id, request.prompt_tokens, self.now)

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
            assert worker.totals.active == len(here)
            assert worker.totals.waiting_tokens == sum(p.uncached for p in here if not p.first_token)
            assert worker.totals.running <= len(here)

    @invariant()
    def nobody_waits_while_a_worker_has_room(self) -> None:
        assert self.dispatcher.waiting == len(self.waiting)
        if len(self.placed) >= MAX_RESERVATIONS:
            return
        for request, _ in self.waiting.values():
            for worker_id in self.may_run(request):
                assert sum(p.worker_id == worker_id for p in self.placed.values()) >= PER_WORKER


TestRouterAgainstTheModel = RouterMachine.TestCase
TestRouterAgainstTheModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
