"""What the router knows: workers, the hosts' lower tiers, reservations, prefixes being computed."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from enum import StrEnum

from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.inflight import InFlightPrefixes
from kvbus_router.core.limits import Limits
from kvbus_router.core.news import Correction, EarlyNews, EndedRequests, Heard, is_later
from kvbus_router.core.prefills import RemotePrefills
from kvbus_router.core.roster import Roster
from kvbus_router.core.shares import Shares
from kvbus_router.core.workers import Reservation, Worker
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision

NOBODY = Roster()
MAX_ENDS = 4096


class Ending(StrEnum):
    """Why a reservation ended. Age is none of the reasons.

    ``given_up``: whoever asked for the placement did not wait for it. ``not_arrived``: the worker never listed it; ``vanished``: it
    does not list it any more, and nobody had told of the end.
    """

    FINISHED = "finished"
    MOVED = "moved"
    GIVEN_UP = "given_up"
    WORKER_GONE = "worker_gone"
    NOT_ARRIVED = "not_arrived"
    VANISHED = "vanished"


class RouterState:
    """Times are monotonic seconds.

    What routers and frontends tell is a guess until the worker's report confirms it: of a request that a report lists, the worker
    knows best. Every reservation that was made is there until exactly one `Ending` is counted for it. ``expected_output``: tokens
    that are expected of a request of which only its worker has told. ``changes``: counts what may change who may take a request.
    """

    def __init__(self, limits: Limits, expected_output: int = 256) -> None:
        self.limits = limits
        self.changes = 0
        self._expected_output = expected_output
        self.inflight = InFlightPrefixes(limits.max_inflight_key_bytes, limits.inflight_grace_s)
        self.prefills = RemotePrefills(limits.reservation_grace_s)
        self.endings: dict[Ending, int] = dict.fromkeys(Ending, 0)
        self.corrections: dict[Correction, int] = dict.fromkeys(Correction, 0)
        self.early = EarlyNews(limits.max_early_news)
        self._ended = EndedRequests(limits.max_ended_requests)
        self.shares = Shares()
        self.ends: deque[tuple[str, FlowKey]] = deque(maxlen=MAX_ENDS)
        """Requests that have ended, until somebody takes them from here."""
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, dict[str, Worker]] = {}
        self._rosters: dict[str, Roster] = {}
        self._kvbms: dict[str, InstanceRecord] = {}
        self._placed: dict[str, Worker] = {}

    # -- the directory

    def joined(self, record: InstanceRecord, now: float = 0.0) -> None:
        """A record is new or has changed. What was heard of a new worker before counts from now on."""
        if record.kvbm is not None:
            self._kvbms[record.instance_id] = record
        if record.worker is None:
            return
        known = self._workers.get(record.instance_id)
        if known is not None and record.incarnation < known.incarnation:
            return
        if known is not None and (known.incarnation, known.worker.model.name) == (
            record.incarnation,
            record.worker.model.name,
        ):
            if (known.worker.role, known.worker.transfers) != (record.worker.role, record.worker.transfers):
                self._rosters.pop(record.worker.model.name, None)
            known.record, known.worker = record, record.worker
            self.changes += 1
            return
        self._drop_worker(record.instance_id)
        worker = self._workers[record.instance_id] = Worker(record, record.worker, now)
        self.changes += 1
        self._models.setdefault(record.worker.model.name, {})[record.instance_id] = worker
        self._rosters.pop(record.worker.model.name, None)
        for news, heard_at in self.early.take(record.instance_id):
            if isinstance(news, LoadReport):
                self.load_report(news, heard_at)
            else:
                self.apply_decision(news, heard_at)

    def left(self, record: InstanceRecord) -> None:
        """The record is gone. Of an older incarnation than the known one: nothing happens."""
        kvbm = self._kvbms.get(record.instance_id)
        if kvbm is not None and kvbm.incarnation <= record.incarnation:
            del self._kvbms[record.instance_id]
        worker = self._workers.get(record.instance_id)
        if worker is not None and worker.incarnation <= record.incarnation:
            self._drop_worker(record.instance_id)

    def _drop_worker(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self.changes += 1
        name = worker.worker.model.name
        del self._models[name][worker_id]
        self._rosters.pop(name, None)
        if not self._models[name]:
            del self._models[name]
        for reservation in worker.reservations.values():
            self._forget(reservation, Ending.WORKER_GONE)
        self.inflight.drop_worker(worker_id)
        self.prefills.drop_worker(worker_id)

    # -- load and progress

    def load_report(self, report: LoadReport, now: float) -> Heard:
        worker = self._workers.get(report.instance_id)
        if worker is None or worker.incarnation < report.incarnation:
            self.early.keep(report, now)
            return Heard.EARLY
        if worker.incarnation > report.incarnation:
            return Heard.OLD_INCARNATION
        if not worker.accepts(report):
            return Heard.REORDERED
        was_draining = worker.draining
        verified = worker.update(report, now, self.limits.reservation_grace_s)
        self.changes += worker.draining != was_draining
        self.prefills.reported(worker.worker_id, report.prefill_ids, now)
        for reservation in verified.over:
            self._forget(reservation, Ending.VANISHED if reservation.listed else Ending.NOT_ARRIVED)
            self._discard_uncomputed(reservation.request_id)
        self.corrections[Correction.LATE] += verified.late
        for request_id, said in verified.unknown.items():
            self._adopt(worker, request_id, said, now)
        return Heard.APPLIED

    def _adopt(self, worker: Worker, request_id: str, said: int, now: float) -> None:
        """A worker lists a request of which it has no reservation. The report counts it already."""
        elsewhere = self._placed.get(request_id)
        if elsewhere is not None:
            if elsewhere.reservations[request_id].listed:
                return
            self._forget(elsewhere.release(request_id), Ending.MOVED)
            self._discard(request_id)
        elif not self.can_reserve():
            self.corrections[Correction.UNTRACKED] += 1
            return
        reservation = Reservation(
            request_id=request_id,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            prompt_tokens=0,
            uncached_tokens=0,
            expected_output=self._expected_output,
            placed_at=now,
            first_token_at=now if said else None,
            listed=True,
            output_tokens=said,
        )
        self._add(worker, reservation)
        outlived = Correction.OUTLIVED if request_id in self._ended else Correction.ADOPTED
        self.corrections[outlived if elsewhere is None else Correction.MOVED] += 1

    def first_token(self, request_id: str, now: float) -> None:
        worker = self._placed.get(request_id)
        if worker is not None:
            worker.first_token(worker.reservations[request_id], now)
            self.inflight.computed(request_id, now)
            self.inflight.computed(_elsewhere(request_id), now)
            self.prefills.drop(request_id)

    def finished(self, request_id: str) -> bool:
        """The request is over wherever it was: decisions on it come too late from now on. Returns whether it had a reservation."""
        self._ended.add(request_id)
        return self._release(request_id, Ending.FINISHED)

    def give_up(self, request_id: str) -> bool:
        """Nobody waits for the placement any more; whoever asked may ask another router. Returns whether it had a reservation."""
        return self._release(request_id, Ending.GIVEN_UP)

    # -- reservations

    def can_reserve(self) -> bool:
        return len(self._placed) < self.limits.max_reservations

    def reserve(self, reservation: Reservation, keys: bytes, prefill_worker_id: str = "", tokens: int = 0) -> None:
        """Raise KeyError for a worker that is not known. An earlier reservation of the request moves. ``tokens`` of the prompt are
        computed by another worker, where one is named."""
        worker = self._workers[reservation.worker_id]
        self._release_moved(reservation.request_id)
        self._add(worker, reservation)
        self.inflight.add(reservation.request_id, reservation.worker_id, keys)
        if prefill_worker_id in self._workers:
            self.prefills.add(reservation.request_id, prefill_worker_id, tokens, reservation.placed_at)
            self.inflight.add(_elsewhere(reservation.request_id), prefill_worker_id, keys)

    def _discard(self, request_id: str) -> None:
        self.inflight.discard(request_id)
        self.inflight.discard(_elsewhere(request_id))

    def _discard_uncomputed(self, request_id: str) -> None:
        self.inflight.discard_uncomputed(request_id)
        self.inflight.discard_uncomputed(_elsewhere(request_id))

    def _add(self, worker: Worker, reservation: Reservation) -> None:
        worker.reserve(reservation)
        self._placed[reservation.request_id] = worker
        self.shares.add(reservation.flow)

    def withdraw(self, request_id: str) -> bool:
        """Undo a placement, because the request is placed anew. What was heard of it before counts no more."""
        self._ended.forget(request_id)
        self.early.forget(request_id)
        return self._release_moved(request_id)

    def _release_moved(self, request_id: str) -> bool:
        released = self._release(request_id, Ending.MOVED)
        if released:
            self._discard(request_id)
        return released

    def apply_decision(self, decision: Decision, now: float) -> Heard:
        """A replica has placed a request."""
        heard = self._judge(decision)
        if heard is Heard.EARLY:
            self.early.keep(decision, now)
        if heard is not Heard.APPLIED:
            return heard
        reservation = Reservation.of(decision, now)
        known = self.reservation(decision.request_id)
        if known is None or known.worker_id != decision.worker_id:
            self.reserve(reservation, decision.keys, decision.prefill_worker_id, decision.prefill_tokens)
        else:
            self.shares.drop(known.flow)
            self._add(self._workers[decision.worker_id], reservation)
            if reservation.first_token_at is None and not reservation.output_tokens:
                self.inflight.add(decision.request_id, decision.worker_id, decision.keys)
        return Heard.APPLIED

    def _judge(self, decision: Decision) -> Heard:
        if decision.request_id in self._ended:
            return Heard.ENDED
        worker = self._workers.get(decision.worker_id)
        if worker is None or worker.incarnation < decision.incarnation:
            return Heard.EARLY
        if worker.incarnation > decision.incarnation:
            return Heard.OLD_INCARNATION
        known, decided = self.reservation(decision.request_id), (decision.decided_ms, decision.router_id)
        if known is None:
            return Heard.APPLIED if self.can_reserve() else Heard.FULL
        if known.worker_id == decision.worker_id:
            return Heard.KNOWN if known.decided == decided or known.predicted is not None else Heard.APPLIED
        return Heard.SUPERSEDED if known.listed or not is_later(decided, known.decided) else Heard.APPLIED

    def _release(self, request_id: str, ending: Ending) -> bool:
        worker = self._placed.get(request_id)
        if worker is None:
            return False
        self._forget(worker.release(request_id), ending)
        self._discard_uncomputed(request_id)
        return True

    def _forget(self, reservation: Reservation, ending: Ending) -> None:
        del self._placed[reservation.request_id]
        self.prefills.drop(reservation.request_id)
        self.shares.drop(reservation.flow)
        self.endings[ending] += 1
        if ending is not Ending.MOVED:
            self.ends.append((reservation.request_id, reservation.flow))

    # -- queries

    @property
    def reservations(self) -> int:
        return len(self._placed)

    def reservation(self, request_id: str) -> Reservation | None:
        worker = self._placed.get(request_id)
        return None if worker is None else worker.reservations[request_id]

    def worker(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def roster(self, model: str) -> Roster:
        """The workers of a model."""
        if model not in self._models:
            return NOBODY
        if model not in self._rosters:
            self._rosters[model] = Roster(self._models[model].values())
        return self._rosters[model]

    def workers(self, model: str) -> Iterator[Worker]:
        """Those of a model, in a stable order."""
        return iter(self._models.get(model, {}).values())

    @property
    def worker_count(self) -> int:
        return len(self._workers)

    def unheard(self) -> list[str]:
        """Ids of the workers that have not reported yet."""
        return [worker.worker_id for worker in self._workers.values() if worker.report is None]

    def silent_since(self) -> list[float]:
        """Of each worker, when its last report came, or when the directory named it. May be called from another thread."""
        return [worker.heard_at for worker in list(self._workers.values())]

    @property
    def models(self) -> list[str]:
        return sorted(self._models)

    @property
    def kvbms(self) -> Mapping[str, InstanceRecord]:
        return self._kvbms

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        held = {request_id: w for w in self._workers.values() for request_id in w.reservations}
        if held != self._placed or sum(len(w.reservations) for w in self._workers.values()) != len(held):
            raise AssertionError("a reservation is on two workers, or on none")
        by_model = {w.worker_id: w for workers in self._models.values() for w in workers.values()}
        if by_model != self._workers or not all(self._models.values()):
            raise AssertionError("the models are off")
        if any(list(roster.workers) != list(self.workers(model)) for model, roster in self._rosters.items()):
            raise AssertionError("a roster is stale")
        self.shares.check_integrity(Counter(w.reservations[request_id].flow for request_id, w in held.items()))
        if len(self._placed) > self.limits.max_reservations:
            raise AssertionError("too many reservations")
        if len(self.early) > self.limits.max_early_news or len(self._ended) > self.limits.max_ended_requests:
            raise AssertionError("too much is remembered")
        for worker in self._workers.values():
            if worker.totals != worker._count() or worker.occupancy != worker._occupancy():
                raise AssertionError("stale totals")
        self.inflight.check_integrity()
        self.prefills.check_integrity()
        if len(self.prefills) > len(self._placed):
            raise AssertionError("a remote prefill of no request")


def _elsewhere(request_id: str) -> str:
    """The prefix that is computed for the request on another worker, among the prefixes in flight."""
    return f"{request_id}|prefill"
