"""What the router knows: workers, the hosts' lower tiers, reservations, prefixes being computed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum

from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.inflight import InFlightPrefixes
from kvbus_router.core.limits import Limits
from kvbus_router.core.shares import Shares
from kvbus_router.core.workers import Reservation, Worker
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision


class Ending(StrEnum):
    """Why a reservation ended. Age is none of the reasons."""

    FINISHED = "finished"
    MOVED = "moved"
    WORKER_GONE = "worker_gone"
    NOT_REPORTED = "not_reported"


class RouterState:
    """Times are monotonic seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inflight = InFlightPrefixes(limits.max_inflight_key_bytes, limits.inflight_grace_s)
        self.endings: dict[Ending, int] = dict.fromkeys(Ending, 0)
        self.shares = Shares()
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, dict[str, Worker]] = {}
        self._kvbms: dict[str, InstanceRecord] = {}
        self._placed: dict[str, Worker] = {}

    # -- the directory

    def joined(self, record: InstanceRecord) -> None:
        """A record is new or has changed."""
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
            known.record, known.worker = record, record.worker
            return
        self._drop_worker(record.instance_id)
        worker = self._workers[record.instance_id] = Worker(record, record.worker)
        self._models.setdefault(record.worker.model.name, {})[record.instance_id] = worker

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
        name = worker.worker.model.name
        del self._models[name][worker_id]
        if not self._models[name]:
            del self._models[name]
        for reservation in worker.reservations.values():
            self._forget(reservation, Ending.WORKER_GONE)
        self.inflight.drop_worker(worker_id)

    # -- load and progress

    def load_report(self, report: LoadReport, now: float) -> bool:
        """False: it is of an instance or incarnation that the directory does not name (yet, or any more)."""
        worker = self._workers.get(report.instance_id)
        if worker is None or worker.incarnation != report.incarnation:
            return False
        for reservation in worker.update(report, now, self.limits.reservation_grace_s):
            self._forget(reservation, Ending.NOT_REPORTED)
            self.inflight.discard_uncomputed(reservation.request_id)
        return True

    def first_token(self, request_id: str, now: float) -> None:
        worker = self._placed.get(request_id)
        if worker is not None:
            worker.first_token(worker.reservations[request_id], now)
            self.inflight.computed(request_id, now)

    def finished(self, request_id: str) -> bool:
        """Returns whether there was a reservation."""
        return self._release(request_id, Ending.FINISHED)

    # -- reservations

    def can_reserve(self) -> bool:
        return len(self._placed) < self.limits.max_reservations

    def reserve(self, reservation: Reservation, keys: bytes) -> None:
        """Raise KeyError for a worker that is not known. An earlier reservation of the request moves."""
        worker = self._workers[reservation.worker_id]
        self.withdraw(reservation.request_id)
        worker.reserve(reservation)
        self._placed[reservation.request_id] = worker
        self.shares.add(reservation.flow)
        self.inflight.add(reservation.request_id, reservation.worker_id, keys)

    def withdraw(self, request_id: str) -> bool:
        """Undo a placement, because the request is placed anew."""
        released = self._release(request_id, Ending.MOVED)
        if released:
            self.inflight.discard(request_id)
        return released

    def apply_decision(self, decision: Decision, now: float) -> bool:
        """A replica has placed a request. False: on a worker that is not known here, or there are too many reservations."""
        worker = self._workers.get(decision.worker_id)
        if worker is None or worker.incarnation != decision.incarnation:
            return False
        if decision.request_id not in self._placed and not self.can_reserve():
            return False
        reservation = Reservation(
            request_id=decision.request_id,
            worker_id=decision.worker_id,
            incarnation=decision.incarnation,
            prompt_tokens=decision.prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            expected_output=decision.expected_output,
            placed_at=now,
            flow=FlowKey(decision.policy_class, decision.tenant),
        )
        self.reserve(reservation, decision.keys)
        return True

    def _release(self, request_id: str, ending: Ending) -> bool:
        worker = self._placed.get(request_id)
        if worker is None:
            return False
        self._forget(worker.release(request_id), ending)
        self.inflight.discard_uncomputed(request_id)
        return True

    def _forget(self, reservation: Reservation, ending: Ending) -> None:
        del self._placed[reservation.request_id]
        self.shares.drop(reservation.flow)
        self.endings[ending] += 1

    # -- queries

    @property
    def reservations(self) -> int:
        return len(self._placed)

    def reservation(self, request_id: str) -> Reservation | None:
        worker = self._placed.get(request_id)
        return None if worker is None else worker.reservations[request_id]

    def worker(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def workers(self, model: str) -> Iterator[Worker]:
        """Those of a model, in a stable order."""
        return iter(self._models.get(model, {}).values())

    @property
    def worker_count(self) -> int:
        return len(self._workers)

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
        self.shares.check_integrity(Counter(w.reservations[request_id].flow for request_id, w in held.items()))
        if len(self._placed) > self.limits.max_reservations:
            raise AssertionError("too many reservations")
        for worker in self._workers.values():
            if worker.totals != worker._count() or worker.occupancy != worker._occupancy():
                raise AssertionError("stale totals")
        self.inflight.check_integrity()
