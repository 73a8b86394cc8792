"""Two routers, two workers and a bus that loses, repeats, delays and reorders what they tell each other.

Whatever has happened: once each worker has reported what it has to each router, all routers know exactly that. Nothing is left,
nothing is missing, nothing is counted twice.
"""

from collections import deque
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_testkit.routing import MODEL, chain, request, worker_record
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_tokens
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, Progress

WORKERS = ("w0", "w1")
ROUTERS = 2
GRACE_S = 5.0
LATER = 1e9

News = Decision | Progress | LoadReport
routers = st.integers(0, ROUTERS - 1)
workers = st.sampled_from(WORKERS)
any_of = st.integers(0, 10**6)


class Engine:
    """What a worker really runs: requests with their output so far."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.running: dict[str, int] = {}
        self.seq = 0


class LossyBus(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wall_ms = [1_000_000, 1_000_000]
        self.requests = 0
        self.engines = {worker_id: Engine() for worker_id in WORKERS}
        self.bus: list[tuple[int, News]] = []
        # The directory loses nothing and keeps the order, but each router hears it in its own time.
        self.directory: list[deque[tuple[str, InstanceRecord]]] = [deque() for _ in range(ROUTERS)]
        self.on_their_way: list[tuple[str, str, int]] = []
        self.routers = [self.router(number) for number in range(ROUTERS)]

    def router(self, number: int) -> Dispatcher:
        limits = Limits(max_requests_per_worker=10**6, reservation_grace_s=GRACE_S, max_early_news=4)
        made = Dispatcher(
            f"router-{number}",
            limits,
            Weights(),
            KvPolicy(),
            Random(number),
            unix_ms=lambda: self.wall_ms[number],
        )
        for worker_id, engine in self.engines.items():
            made.joined(worker_record(worker_id, incarnation=engine.incarnation), self.now)
        return made

    def publish(self, *news: News, by: int | None = None) -> None:
        self.bus += [(router, one) for router in range(ROUTERS) if router != by for one in news]

    # -- requests

    @rule(number=routers, blocks=st.integers(0, 3))
    def route(self, number: int, blocks: int) -> None:
        self.requests += 1
        asked = request(f"r{self.requests}", keys=chain(*range(1, blocks + 1)), prompt_tokens=16 * blocks + 9)
        outcome, _ = self.routers[number].submit(asked, (), LATER, self.now)
        assert isinstance(outcome, Placed)
        self.publish(outcome.decision, by=number)
        placement = outcome.placement
        self.on_their_way.append((placement.request_id, placement.worker_id, placement.incarnation))

    @rule(which=any_of)
    def arrive(self, which: int) -> None:
        if self.on_their_way:
            request_id, worker_id, incarnation = self.on_their_way.pop(which % len(self.on_their_way))
            engine = self.engines[worker_id]
            if engine.incarnation == incarnation:
                engine.running[request_id] = 0
            else:
                self.publish(Progress(request_id=request_id, model=MODEL, phase="finished"))

    @rule(worker_id=workers)
    def step(self, worker_id: str) -> None:
        for request_id, said in self.engines[worker_id].running.items():
            self.engines[worker_id].running[request_id] = said + 1
            if not said:
                self.publish(Progress(request_id=request_id, model=MODEL, phase="first_token"))

    @rule(worker_id=workers, which=any_of, told=st.booleans())
    def end(self, worker_id: str, which: int, told: bool) -> None:
        """``told``: else the frontend has died."""
        running = self.engines[worker_id].running
        if running:
            request_id = list(running)[which % len(running)]
            del running[request_id]
            if told:
                self.publish(Progress(request_id=request_id, model=MODEL, phase="finished"))

    @rule(which=any_of)
    def give_up(self, which: int) -> None:
        """The client goes away before the request is at its worker; it arrives there all the same, or it does not."""
        if self.on_their_way:
            request_id, _, _ = self.on_their_way[which % len(self.on_their_way)]
            self.publish(Progress(request_id=request_id, model=MODEL, phase="finished"))

    # -- workers and routers

    @rule(worker_id=workers)
    def report(self, worker_id: str) -> None:
        self.publish(self.report_of(worker_id))

    def report_of(self, worker_id: str) -> LoadReport:
        engine = self.engines[worker_id]
        engine.seq += 1
        said = list(engine.running.values())
        return LoadReport(
            instance_id=worker_id,
            incarnation=engine.incarnation,
            model=MODEL,
            running=sum(tokens > 0 for tokens in said),
            waiting=sum(tokens == 0 for tokens in said),
            waiting_tokens=10 * sum(tokens == 0 for tokens in said),
            used_blocks=0,
            total_blocks=100,
            kv_seq=0,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
            request_ids=tuple(engine.running),
            output_tokens=pack_tokens(said),
            seq=engine.seq,
        )

    @rule(worker_id=workers, told=st.booleans())
    def restart_worker(self, worker_id: str, told: bool) -> None:
        engine = self.engines[worker_id]
        old = worker_record(worker_id, incarnation=engine.incarnation)
        engine.incarnation += 1
        engine.running.clear()
        engine.seq = 0
        for heard in self.directory:
            if told:
                heard.append(("left", old))
            heard.append(("joined", worker_record(worker_id, incarnation=engine.incarnation)))

    @rule(number=routers)
    def restart_router(self, number: int) -> None:
        self.directory[number].clear()
        self.routers[number] = self.router(number)

    # -- the bus

    @rule(which=any_of, again=st.booleans())
    def deliver(self, which: int, again: bool) -> None:
        if self.bus:
            at = which % len(self.bus)
            number, news = self.bus[at] if again else self.bus.pop(at)
            self.hear(number, news)

    @rule(which=any_of)
    def lose(self, which: int) -> None:
        if self.bus:
            self.bus.pop(which % len(self.bus))

    @rule(number=routers)
    def hear_of_workers(self, number: int) -> None:
        if self.directory[number]:
            change, record = self.directory[number].popleft()
            if change == "joined":
                self.routers[number].joined(record, self.now)
            else:
                self.routers[number].state.left(record)

    def hear(self, number: int, news: News) -> None:
        router = self.routers[number]
        match news:
            case Decision():
                router.apply_decision(news, self.now)
            case LoadReport():
                router.load_report(news, self.now)
            case Progress(phase="first_token"):
                router.first_token(news.request_id, self.now)
            case Progress():
                router.finished(news.request_id)
                assert not router.finished(news.request_id), "what is released once is gone"

    @rule(seconds=st.floats(0.0, 2 * GRACE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=routers, seconds=st.integers(-3600, 3600))
    def a_wall_clock_jumps(self, number: int, seconds: int) -> None:
        self.wall_ms[number] += seconds * 1000

    # -- what must hold

    @invariant()
    def the_accounts_are_sound(self) -> None:
        for router in self.routers:
            router.check_integrity()

    def teardown(self) -> None:
        """The bus is quiet, what was on its way is lost, and every worker reports."""
        for number in range(ROUTERS):
            while self.directory[number]:
                self.hear_of_workers(number)
        self.now += GRACE_S + 1
        # The second report: an end that was told just before the first one may not have been true.
        for _ in range(2):
            for worker_id in WORKERS:
                report = self.report_of(worker_id)
                for number in range(ROUTERS):
                    self.hear(number, report)
        for router in self.routers:
            router.check_integrity()
            assert router.state.reservations == sum(len(engine.running) for engine in self.engines.values())
            for worker_id, engine in self.engines.items():
                worker = router.state.worker(worker_id)
                assert worker is not None
                assert set(worker.reservations) == set(engine.running)
                assert worker.totals.active == len(engine.running)
                assert worker.totals.waiting_tokens == 10 * sum(said == 0 for said in engine.running.values())
                assert worker.totals.running == sum(said > 0 for said in engine.running.values())


TestReplicasOverALossyBus = LossyBus.TestCase
TestReplicasOverALossyBus.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
