"""One worker as the router sees it: its record, its last load report, and what was placed on it since.

A report counts everything the worker knows of, so a reservation that it lists is in its numbers already, and one that it does
not list comes on top:

    reservation                         its request counts      its uncached tokens count
    not in the report, no first token   on top                  on top
    not in the report, first token      on top                  no more
    in the report, no first token       in the report           in the report
    in the report, first token since    in the report           taken off the report
    in the report, ended since          taken off the report    taken off the report (if it had no first token before the report)
    in the report, ended just before    taken off the report    taken off the report (if it had no first token)

The last line: the report was on its way when the end was told. The next report still lists it? Then the worker is right: it runs.
"""

import msgspec

from kvbus_router.core.busy import output_left, share_left
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.fairness import ONE_FLOW, FlowKey
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import TOKEN_BYTES, unpack_tokens
from kvbus_wire.records import InstanceRecord, WorkerRecord
from kvbus_wire.router import Decision

MAX_ENDED_SINCE = 4096
_MOST_RATE = 1e12
MOST_OVERTAKEN = 8
"""Reports in a row that may be older than the last one; see `Worker.accepts`."""
"""Ends that are remembered until a worker's next report. What is forgotten is counted until the report after that."""


class Reservation(msgspec.Struct):
    """A placed request. ``listed``: the worker's last report names it, with ``reported_tokens`` of it still to prefill then.
    ``output_tokens``: said so far; ``flow``: in whose share it runs; ``predicted``: what it was placed for, None when this router
    did not place it; ``decided``: when and by which router it was placed (unix milliseconds, id)."""

    request_id: str
    worker_id: str
    incarnation: int
    prompt_tokens: int
    uncached_tokens: int
    expected_output: int
    placed_at: float
    first_token_at: float | None = None
    listed: bool = False
    reported_tokens: int = 0
    output_tokens: int = 0
    flow: FlowKey = ONE_FLOW
    predicted: Estimate | None = None
    decided: tuple[int, str] = (0, "")

    @classmethod
    def of(cls, decision: Decision, now: float, predicted: Estimate | None = None) -> "Reservation":
        return cls(
            request_id=decision.request_id,
            worker_id=decision.worker_id,
            incarnation=decision.incarnation,
            prompt_tokens=decision.prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            expected_output=decision.expected_output,
            placed_at=now,
            flow=FlowKey(decision.policy_class, decision.tenant),
            predicted=predicted,
            decided=(decision.decided_ms, decision.router_id),
        )


class Totals(msgspec.Struct, frozen=True):
    """``active``: requests that wait or run there; ``running``: of these, those that take part in its steps.

    ``waiting_tokens``: prompt tokens that it still has to compute.
    """

    active: int
    running: int
    waiting_tokens: int


class Occupancy(msgspec.Struct, frozen=True):
    """How long it will be busy. ``busy``: the running requests, each as far as it has still to go; ``output_left``: tokens that are
    still to come of each request that is known, ascending."""

    busy: float
    output_left: tuple[int, ...]


class Verified(msgspec.Struct, frozen=True):
    """What a report says about the reservations. ``over``: those that it shows to be over. ``unknown``: requests that it lists and
    of which there is no reservation, with the output so far. ``late``: listed ones that had ended by the time it came."""

    over: list[Reservation]
    unknown: dict[str, int]
    late: int


class Worker:
    """Use `RouterState` to change it. ``heard_at``: when its last report came, or the directory named it."""

    def __init__(self, record: InstanceRecord, worker: WorkerRecord, now: float = 0.0) -> None:
        self.record = record
        self.worker = worker
        self.report: LoadReport | None = None
        self.heard_at = now
        self.reservations: dict[str, Reservation] = {}
        # Reports in a row that seem to have come too late, and the number of the last of them.
        self._overtaken = 0
        self._overtaken_seq = 0
        # Of requests in the report that have ended.
        self._ended = 0
        self._ended_tokens = 0
        # Since the report, by id: the tokens that a report that does not know it yet may count.
        self._ended_since: dict[str, int] = {}
        self._totals: Totals | None = None
        self._occupied: Occupancy | None = None

    @property
    def worker_id(self) -> str:
        return self.record.instance_id

    @property
    def incarnation(self) -> int:
        return self.record.incarnation

    @property
    def draining(self) -> bool:
        return self.record.draining or (self.report is not None and self.report.draining)

    @property
    def prefill_tokens_per_s(self) -> float:
        measured = self.report.prefill_tokens_per_s if self.report is not None else 0.0
        return max(_rate(measured) or _rate(self.worker.prefill_tokens_per_s), 1.0)

    @property
    def decode_step_s(self) -> float:
        measured = self.report.decode_step_s if self.report is not None else 0.0
        return _rate(measured) or _rate(self.worker.decode_step_s)

    def onboard_tokens_per_s(self, source: str) -> float:
        """As the worker has measured it; 0 when it never has."""
        return _rate(self.report.onboard_tokens_per_s.get(source, 0.0)) if self.report is not None else 0.0

    @property
    def handover_s(self) -> float:
        """What a remote prefill takes besides computing, as it has measured it; 0 when it never has."""
        return _rate(self.report.handover_s) if self.report is not None else 0.0

    @property
    def used_blocks(self) -> int:
        """Device blocks of running requests; those that are only cached do not count."""
        return self.report.used_blocks if self.report is not None else 0

    @property
    def total_blocks(self) -> int:
        return self.report.total_blocks if self.report is not None else self.worker.total_blocks

    @property
    def totals(self) -> Totals:
        if self._totals is None:
            self._totals = self._count()
        return self._totals

    @property
    def occupancy(self) -> Occupancy:
        if self._occupied is None:
            self._occupied = self._occupancy()
        return self._occupied

    def reserve(self, reservation: Reservation) -> None:
        """One of the same request, which a decision has told before or a report has shown, is only made complete."""
        known = self.reservations.get(reservation.request_id)
        if known is not None:
            reservation.placed_at = known.placed_at
            reservation.first_token_at = known.first_token_at
            reservation.listed = known.listed
            reservation.output_tokens = known.output_tokens
            reservation.reported_tokens = _reported_tokens(reservation)
        self.reservations[reservation.request_id] = reservation
        self._ended_since.pop(reservation.request_id, None)
        self._changed()

    def first_token(self, reservation: Reservation, now: float) -> None:
        if reservation.first_token_at is None:
            reservation.first_token_at = now
            self._changed()

    def release(self, request_id: str) -> Reservation:
        reservation = self.reservations.pop(request_id)
        if reservation.listed:
            self._ended += 1
            self._ended_tokens += reservation.reported_tokens
        self._ended_since[request_id] = reservation.uncached_tokens if reservation.first_token_at is None else 0
        if len(self._ended_since) > MAX_ENDED_SINCE:
            del self._ended_since[next(iter(self._ended_since))]
        self._changed()
        return reservation

    def accepts(self, report: LoadReport) -> bool:
        """Whether a report counts: not if it is older than the last one, or the same.

        When several in a row are older and follow each other, the number of the last one was wrong. Nothing of the worker would
        ever count again.
        """
        if self.report is not None and 0 < report.seq <= self.report.seq:
            self._overtaken = self._overtaken + 1 if report.seq > self._overtaken_seq else 1
            self._overtaken_seq = report.seq
            if self._overtaken < MOST_OVERTAKEN:
                return False
        self._overtaken = 0
        return True

    def update(self, report: LoadReport, now: float, grace_s: float) -> Verified:
        """Take over a report. A reservation is over when it was listed and is not any more, or was never listed although the
        request had ``grace_s`` to arrive. Those that are over are gone from here already."""
        named = _said_so_far(report)
        over = [
            r
            for r in self.reservations.values()
            if r.request_id not in named and not report.ids_cut and (r.listed or now - r.placed_at > grace_s)
        ]
        for r in over:
            del self.reservations[r.request_id]
        for reservation in self.reservations.values():
            reservation.listed = reservation.request_id in named or (report.ids_cut and reservation.listed)
            # A report that is late, or of a worker that does not tell, takes nothing back.
            reservation.output_tokens = max(reservation.output_tokens, named.get(reservation.request_id, 0))
            reservation.reported_tokens = _reported_tokens(reservation)
        late = named.keys() & self._ended_since.keys()
        self._ended = len(late)
        self._ended_tokens = sum(self._ended_since[request_id] for request_id in late)
        self._ended_since.clear()
        self.report, self.heard_at = report, now
        self._changed()
        unknown = {r: said for r, said in named.items() if r not in self.reservations and r not in late}
        return Verified(over, unknown, len(late))

    def _changed(self) -> None:
        self._totals = self._occupied = None

    def _count(self) -> Totals:
        running = waiting = waiting_tokens = 0
        if self.report is not None:
            running, waiting, waiting_tokens = self.report.running, self.report.waiting, self.report.waiting_tokens
        done_tokens = self._ended_tokens
        unlisted = unlisted_tokens = unlisted_running = 0
        for r in self.reservations.values():
            if r.listed:
                done_tokens += r.reported_tokens if r.first_token_at is not None else 0
                continue
            unlisted += 1
            if r.first_token_at is None:
                unlisted_tokens += r.uncached_tokens
            else:
                unlisted_running += 1
        return Totals(
            active=max(0, running + waiting - self._ended) + unlisted,
            running=max(0, running - self._ended) + unlisted_running,
            waiting_tokens=max(0, waiting_tokens - done_tokens) + unlisted_tokens,
        )

    def _occupancy(self) -> Occupancy:
        reservations = self.reservations.values()
        said = sum(
            1 - share_left(r.expected_output, r.output_tokens) for r in reservations if r.first_token_at is not None
        )
        left = sorted(output_left(r.expected_output, r.output_tokens) for r in reservations)
        return Occupancy(max(0.0, self.totals.running - said), tuple(left))


def _rate(told: float) -> float:
    """0 where nothing was measured, or what cannot be: sums and products of costs stay finite."""
    return told if 0 < told < _MOST_RATE else 0.0


def _reported_tokens(reservation: Reservation) -> int:
    """What of it the report that lists it counts as still to be computed. Output shows that there is nothing left, even when nobody
    has told of a first token yet."""
    computing = reservation.listed and reservation.first_token_at is None and not reservation.output_tokens
    return reservation.uncached_tokens if computing else 0


def _said_so_far(report: LoadReport) -> dict[str, int]:
    """Output tokens of each request that the report names; 0 where it does not tell."""
    said = (
        unpack_tokens(report.output_tokens)
        if len(report.output_tokens) == TOKEN_BYTES * len(report.request_ids)
        else ()
    )
    return dict.fromkeys(report.request_ids, 0) | dict(zip(report.request_ids, said, strict=False))
