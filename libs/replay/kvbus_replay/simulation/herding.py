"""Replicas that choose at the same moment, in virtual time: do they choose the same worker?

Workers compute one prompt after the other, at rates that differ by up to a tenth each way, as measured rates do: with equal ones
chance would decide, and nobody would see a herd.
"""

from collections import Counter
from functools import partial
from random import Random
from statistics import fmean

import msgspec

from kvbus_replay.simulation.bare_workers import MODEL, TOKENS_PER_S, load_of, worker_of
from kvbus_replay.simulation.clock import VirtualClock
from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_wire.load import LoadReport
from kvbus_wire.router import Decision, RouteRequest

NO_LIMIT = 1_000_000
LATER = 1e9
REPORT_S = 0.25
OUTPUT_S = 2.0
PROMPT_TOKENS = 2000
LOAD = 0.7


class Herding(msgspec.Struct, frozen=True):
    """What came of a scene, see `kvbus bench router`."""

    routers: int
    delay_s: float
    compares: str
    shares: bool
    ttft_mean_s: float
    ttft_p99_s: float
    same_worker: float
    backlog_max_s: float
    backlog_peak: float


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """``at_once``: requests that come at the same moment, each to another router as long as there are any. ``delay_s``: until a
    message is heard. ``everyone``: routers compare all workers, as if each were alone. ``shares``: they tell their decisions."""

    routers: int
    workers: int = 64
    at_once: int = 8
    delay_s: float = 0.005
    everyone: bool = False
    shares: bool = True
    seconds: float = 10.0
    seed: int = 1

    def run(self) -> Herding:
        cluster = _Cluster(self)
        cluster.run()
        ttft_s = sorted(cluster.ttft_s)
        return Herding(
            routers=self.routers,
            delay_s=self.delay_s,
            compares="all" if self.everyone else "some",
            shares=self.shares,
            ttft_mean_s=round(fmean(ttft_s), 4),
            ttft_p99_s=round(ttft_s[int(len(ttft_s) * 0.99)], 4),
            same_worker=round(fmean(cluster.same_worker), 2),
            backlog_max_s=round(fmean(cluster.largest_s), 3),
            backlog_peak=round(fmean(cluster.peaks), 2),
        )


class _Worker:
    def __init__(self, worker_id: str, tokens_per_s: float) -> None:
        self.id = worker_id
        self.tokens_per_s = tokens_per_s
        self.free_at = 0.0
        self.active: dict[str, None] = {}

    def backlog_s(self, now: float) -> float:
        return max(0.0, self.free_at - now)


class _Cluster:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._rng = rng = Random(scene.seed)
        self._clock = VirtualClock()
        self._requests = 0
        self.ttft_s: list[float] = []
        # After each moment: requests of it on one worker at most; the largest backlog, and over the mean one.
        self.same_worker: list[int] = []
        self.largest_s: list[float] = []
        self.peaks: list[float] = []
        self._workers = {
            f"worker-{number}": _Worker(f"worker-{number}", TOKENS_PER_S * rng.uniform(0.9, 1.1))
            for number in range(scene.workers)
        }
        limits = Limits(max_requests_per_worker=NO_LIMIT, exact_workers=NO_LIMIT if scene.everyone else 64)
        self._routers = [
            Dispatcher(f"router-{n}", limits, Weights(), KvPolicy(), Random(scene.seed * 1000 + n))
            for n in range(scene.routers)
        ]
        for router in self._routers:
            router.set_routers([] if scene.everyone else [f"router-{n}" for n in range(scene.routers)])
            for worker in self._workers.values():
                router.joined(worker_of(worker.id, tokens_per_s=worker.tokens_per_s), 0.0)

    def run(self) -> None:
        scene, rng = self._scene, self._rng
        per_s = LOAD * sum(worker.tokens_per_s for worker in self._workers.values()) / PROMPT_TOKENS / scene.at_once
        moment = 0.0
        while (moment := moment + rng.expovariate(per_s)) < scene.seconds:
            self._clock.at(moment, self._moment)
        for worker in self._workers.values():
            self._clock.at(rng.uniform(0.0, REPORT_S), partial(self._report, worker))
        self._clock.run()

    def _moment(self) -> None:
        first, routers = self._rng.randrange(len(self._routers)), self._routers
        chosen = Counter(self._route(routers[(first + number) % len(routers)]) for number in range(self._scene.at_once))
        backlogs_s = [worker.backlog_s(self._clock.now) for worker in self._workers.values()]
        self.same_worker.append(max(chosen.values()))
        self.largest_s.append(max(backlogs_s))
        self.peaks.append(max(backlogs_s) / fmean(backlogs_s))

    def _route(self, router: Dispatcher) -> str:
        now, scene = self._clock.now, self._scene
        self._requests += 1
        request = RouteRequest(
            request_id=f"r{self._requests}",
            model=MODEL,
            keys=b"",
            prompt_tokens=int(PROMPT_TOKENS * self._rng.uniform(0.5, 1.5)),
            max_tokens=100,
            deadline_ms=0,
        )
        placed, _ = router.submit(request, (), LATER, now)
        if not isinstance(placed, Placed):
            raise AssertionError("there is always room")
        worker = self._workers[placed.placement.worker_id]
        worker.free_at = max(now, worker.free_at) + request.prompt_tokens / worker.tokens_per_s
        worker.active[request.request_id] = None
        self.ttft_s.append(worker.free_at - now)
        if scene.shares:
            self._clock.at(now + scene.delay_s, partial(self._tell, router, placed.decision))
        self._clock.at(worker.free_at + scene.delay_s, partial(self._first_token, request.request_id))
        self._clock.at(worker.free_at + OUTPUT_S, partial(self._end, worker, request.request_id))
        return worker.id

    def _tell(self, teller: Dispatcher, decision: Decision) -> None:
        for router in self._routers:
            if router is not teller:
                router.apply_decision(decision, self._clock.now)

    def _first_token(self, request_id: str) -> None:
        for router in self._routers:
            router.first_token(request_id, self._clock.now)

    def _end(self, worker: _Worker, request_id: str) -> None:
        del worker.active[request_id]
        self._clock.at(self._clock.now + self._scene.delay_s, partial(self._finished, request_id))

    def _finished(self, request_id: str) -> None:
        for router in self._routers:
            router.finished(request_id)

    def _report(self, worker: _Worker) -> None:
        report = load_of(
            worker.id,
            len(worker.active),
            int(worker.backlog_s(self._clock.now) * worker.tokens_per_s),
            ids=tuple(worker.active),
            tokens_per_s=worker.tokens_per_s,
        )
        self._clock.at(self._clock.now + self._scene.delay_s, partial(self._hear, report))
        if self._clock.now < self._scene.seconds:
            self._clock.at(self._clock.now + REPORT_S, partial(self._report, worker))

    def _hear(self, report: LoadReport) -> None:
        for router in self._routers:
            router.load_report(report, self._clock.now)
