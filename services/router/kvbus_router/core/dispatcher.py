"""Places requests: at once when a worker has room and nobody waits before them, else in the order of the queue."""

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from kvbus_router.core.affinity import session_key
from kvbus_router.core.choosing import Chooser, Weighed
from kvbus_router.core.eligibility import Sorted
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.explaining import Decided, DecisionLog, explanation, ranked
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.policies import Outcome, RoutingPolicy
from kvbus_router.core.queue import WaitingQueue
from kvbus_router.core.state import RouterState
from kvbus_router.core.workers import Reservation
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.indexer import Match
from kvbus_wire.router import Decision, Placement, RouteExplanation, RouteRequest

RETRY_AFTER_MAX_S = 60.0
# How much one more observation counts in the mean time between two requests that leave the queue.
_TURN_SMOOTHING = 0.1


class Placed(msgspec.Struct, frozen=True):
    """``decision``: the same for the replicas. ``chosen``: the terms of the worker that got it. ``session``: whether that one
    served the session's last request (same, other), or it had none (new); None without a session."""

    placement: Placement
    decision: Decision
    chosen: Estimate
    session: str | None = None


class Refused(msgspec.Struct, frozen=True):
    reply: ErrorReply


class Queued(msgspec.Struct, frozen=True):
    """The outcome comes from a later `pump`."""


class Settled(msgspec.Struct, frozen=True):
    """What became of a request that had waited."""

    request_id: str
    outcome: Placed | Refused


class _Item(msgspec.Struct):
    """``deadline``: on the monotonic clock. ``orphan_since``: since when no worker there is may take it."""

    request: RouteRequest
    matches: Sequence[Match]
    deadline: float
    arrived_at: float
    orphan_since: float | None = None


class Dispatcher:
    """Times are monotonic seconds, but ``unix_ms``, which dates decisions for the replicas. Call `pump` after everything that may
    make room, and at `next_due`."""

    def __init__(
        self,
        router_id: str,
        limits: Limits,
        weights: Weights,
        policy: RoutingPolicy,
        rng: Random,
        *,
        unix_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.state = RouterState(limits)
        self.limits = limits
        self.weights = weights
        self.decisions = DecisionLog(limits.max_explained_requests)
        self._router_id = router_id
        self._chooser = Chooser(self.state, limits, weights, policy, rng)
        self.affinity = self._chooser.affinity
        self._unix_ms = unix_ms
        self._queues: dict[str, WaitingQueue[_Item]] = {}
        self._turn_s = 0.0
        self._last_turn_at: float | None = None

    # -- requests

    def submit(
        self, request: RouteRequest, matches: Sequence[Match], deadline: float, now: float
    ) -> tuple[Placed | Refused | Queued, list[Settled]]:
        """The outcome, and those of others (an earlier try of the same request that still waits, say)."""
        settled = self._withdraw(request.request_id) + self.pump(now)
        return self._admit(_Item(request, matches, deadline, now), now), settled

    def finished(self, request_id: str) -> bool:
        """The request is over, or its client gone: its reservation or its place in the queue is free."""
        for model, queue in self._queues.items():
            if queue.remove(request_id) is not None:
                self._forget_if_empty(model)
                return True
        return self.state.finished(request_id)

    def first_token(self, request_id: str, now: float) -> Outcome | None:
        """A placed request has its first token. What came of this router's own choice (the policy has been told), else None."""
        reservation = self.state.reservation(request_id)
        if reservation is None or reservation.first_token_at is not None:
            return None
        self.state.first_token(request_id, now)
        if reservation.predicted is None:
            return None
        outcome = Outcome(request_id, reservation.predicted, now - reservation.placed_at)
        self.decisions.first_token(request_id, outcome.ttft_s)
        self._chooser.observe(outcome)
        return outcome

    def leave_queue(self, request_id: str, message: str) -> list[Settled]:
        """If the request waits, it does so no more: it is cancelled."""
        for model, queue in self._queues.items():
            if queue.remove(request_id) is not None:
                self._forget_if_empty(model)
                return [Settled(request_id, _refused(ErrorCode.CANCELLED, message, retryable=False))]
        return []

    def apply_decision(self, decision: Decision, now: float) -> tuple[bool, list[Settled]]:
        """A replica has placed a request. False: the reservation could not be made here. If it waits here it does so in vain."""
        settled = self.leave_queue(decision.request_id, "another router has placed the request")
        applied = self.state.apply_decision(decision, now)
        if applied:
            self.affinity.bind(
                session_key(decision.model, decision.tenant, decision.session_id),
                decision.worker_id,
                decided_ms=decision.decided_ms,
                router_id=decision.router_id,
                now=now,
            )
        return applied, settled

    # -- what can be changed, and asked

    @property
    def thresholds(self) -> Thresholds:
        return self._chooser.thresholds

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """In force from now on; `pump` afterwards, since there may be room now. Requests that are placed stay where they are."""
        self._chooser.thresholds = thresholds

    def explain(self, request: RouteRequest, matches: Sequence[Match], now: float) -> RouteExplanation:
        """What would become of the request now. Nothing is placed, and the policy is not asked: it may count its choices."""
        weighed = self._chooser.weigh(request, matches, self._chooser.sort(request), now)
        return explanation(self._decided(request, weighed, None, 0.0), self._router_id)

    def explain_placed(self, request_id: str) -> RouteExplanation | None:
        """Why this router placed a request where it did; None when it does not know (any more)."""
        decided = self.decisions.get(request_id)
        return None if decided is None else explanation(decided, self._router_id)

    def pump(self, now: float) -> list[Settled]:
        """Serve those who wait as far as there is room, and send away those whose time is over."""
        return [settled for model in list(self._queues) for settled in self._pump_model(model, now)]

    def next_due(self) -> float | None:
        """When `pump` must be called at the latest."""
        times = []
        for queue in self._queues.values():
            for item in queue.items():
                times.append(item.deadline)
                if item.orphan_since is not None:
                    times.append(item.orphan_since + self.limits.worker_wait_s)
        return min(times, default=None)

    def refuse_all(self, code: ErrorCode, message: str) -> list[Settled]:
        """The router stops: nobody waits any more."""
        ids = [item.request.request_id for queue in self._queues.values() for item in queue.items()]
        self._queues.clear()
        return [Settled(request_id, _refused(code, message, retryable=True)) for request_id in ids]

    @property
    def waiting(self) -> int:
        # A copy, because the thread that renders the metrics reads this, too.
        return sum(len(queue) for queue in list(self._queues.values()))

    def is_waiting(self, request_id: str) -> bool:
        return any(request_id in queue for queue in self._queues.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        self.state.check_integrity()
        for queue in self._queues.values():
            queue.check_integrity()
            if not queue:
                raise AssertionError("an empty queue was kept")
            for item in queue.items():
                if self.state.reservation(item.request.request_id) is not None:
                    raise AssertionError("a request waits and is placed")
        if self.waiting > self.limits.max_queued:
            raise AssertionError("too many wait")
        self.affinity.check_integrity()
        if len(self.decisions) > self.limits.max_explained_requests:
            raise AssertionError("too many decisions are kept")

    # -- inside

    def _admit(self, item: _Item, now: float) -> Placed | Refused | Queued:
        """After a `pump`: whoever waits now can use none of the room there is, so placing at once overtakes nobody."""
        request = item.request
        if item.deadline <= now:
            return _refused(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed", retryable=False)
        if not self.state.can_reserve():
            return self._overloaded(f"{self.state.reservations} requests are placed")
        workers = self._chooser.sort(request)
        if not workers.eligible and request.pinned is not None:
            return _pinned_gone(request)
        placed = self._place(item, workers, now)
        if placed is not None:
            return placed
        if self.waiting >= self.limits.max_queued:
            return self._overloaded(f"{self.waiting} requests wait")
        item.orphan_since = None if workers.eligible else now
        queue = self._queues.get(request.model)
        if queue is None:
            queue = WaitingQueue(self.limits.max_queued, self.limits.aging_per_s, self.limits.overdue_s)
            self._queues[request.model] = queue
        hints = request.hints
        queue.add(request.request_id, item, strict_priority=hints.strict_priority, priority=hints.priority, now=now)
        return Queued()

    def _withdraw(self, request_id: str) -> list[Settled]:
        self.state.withdraw(request_id)
        return self.leave_queue(request_id, "the request came again")

    def _forget_if_empty(self, model: str) -> None:
        if not self._queues[model]:
            del self._queues[model]

    def _pump_model(self, model: str, now: float) -> list[Settled]:
        queue = self._queues.get(model)
        if queue is None:
            return []
        settled = self._expire(queue, now)
        while (served := self._serve_next(queue, now)) is not None:
            settled.append(served)
        self._forget_if_empty(model)
        return settled

    def _expire(self, queue: WaitingQueue[_Item], now: float) -> list[Settled]:
        settled = []
        # Most requests have no constraints: who may take them is found once.
        may_run: dict[tuple[object, ...], bool] = {}
        for item in queue.items():
            request = item.request
            constraints = (request.pinned, request.allowed, request.excluded, request.required_taints)
            if constraints not in may_run:
                may_run[constraints] = bool(self._chooser.sort(request).eligible)
            refused = self._check_waiting(item, may_run[constraints], now)
            if refused is not None:
                queue.remove(item.request.request_id)
                settled.append(Settled(item.request.request_id, refused))
        return settled

    def _check_waiting(self, item: _Item, may_run: bool, now: float) -> Refused | None:
        if item.deadline <= now:
            message = f"no worker had room for {now - item.arrived_at:.3g} s"
            return _refused(ErrorCode.DEADLINE_EXCEEDED, message, retryable=False)
        if may_run:
            item.orphan_since = None
        elif item.request.pinned is not None:
            return _pinned_gone(item.request)
        elif item.orphan_since is None:
            item.orphan_since = now
        elif now >= item.orphan_since + self.limits.worker_wait_s:
            return _refused(ErrorCode.NO_WORKERS, f"no worker can take model {item.request.model}", retryable=True)
        return None

    def _serve_next(self, queue: WaitingQueue[_Item], now: float) -> Settled | None:
        """Place the first in order that finds room."""
        for waiting in queue.in_order(now):
            item = waiting.item
            if (
                not any(map(self._chooser.has_room, self.state.workers(item.request.model)))
                or not self.state.can_reserve()
            ):
                return None
            placed = self._place(item, self._chooser.sort(item.request), now)
            if placed is not None:
                queue.take_turn(item.request.request_id)
                self._observe_turn(now)
                return Settled(item.request.request_id, placed)
        return None

    def _place(self, item: _Item, workers: Sorted, now: float) -> Placed | None:
        """None when no worker that may take it has room."""
        request = item.request
        weighed = self._chooser.weigh(request, item.matches, workers, now)
        if not weighed.estimates:
            return None
        chosen = self._chooser.choose(weighed.estimates)
        queued_s = now - item.arrived_at
        decided = self._decided(request, weighed, chosen, queued_s)
        self.decisions.add(decided)
        decision = self._decision(request, chosen)
        self._reserve(request, decision, chosen, now)
        placement = Placement(
            request_id=request.request_id,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            cached_tokens=chosen.cached_tokens,
            onboard_tokens=chosen.onboard_tokens,
            policy=self._chooser.policy,
            queued_s=queued_s,
            explanation=explanation(decided, self._router_id) if request.explain else None,
        )
        return Placed(placement, decision, chosen, _session(request, weighed.session_worker_id, chosen.worker_id))

    def _decision(self, request: RouteRequest, chosen: Estimate) -> Decision:
        session = request.session
        return Decision(
            router_id=self._router_id,
            request_id=request.request_id,
            model=request.model,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            prompt_tokens=request.prompt_tokens,
            uncached_tokens=chosen.uncached_tokens,
            expected_output=min(request.hints.osl or self.weights.expected_output_tokens, request.max_tokens),
            keys=request.keys,
            session_id=session.id if session is not None and not session.final else "",
            tenant=request.tenant,
            decided_ms=self._unix_ms(),
        )

    def _reserve(self, request: RouteRequest, decision: Decision, chosen: Estimate, now: float) -> None:
        reservation = Reservation(
            request_id=decision.request_id,
            worker_id=decision.worker_id,
            incarnation=decision.incarnation,
            prompt_tokens=decision.prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            expected_output=decision.expected_output,
            placed_at=now,
            predicted=chosen,
        )
        self.state.reserve(reservation, decision.keys)
        if request.session is None:
            return
        key = session_key(request.model, request.tenant, request.session.id)
        if request.session.final:
            self.affinity.end(key)
            return
        self.affinity.bind(
            key, decision.worker_id, decided_ms=decision.decided_ms, router_id=decision.router_id, now=now
        )

    def _decided(self, request: RouteRequest, weighed: Weighed, chosen: Estimate | None, queued_s: float) -> Decided:
        best, rejected, left_out = ranked(
            weighed.estimates, chosen, weighed.rejected, self.limits.max_explained_workers
        )
        return Decided(
            request_id=request.request_id,
            model=request.model,
            policy=self._chooser.policy,
            prompt_tokens=request.prompt_tokens,
            chosen=chosen,
            queued_s=queued_s,
            session_worker_id=weighed.session_worker_id,
            best=best,
            rejected=rejected,
            left_out=left_out,
        )

    def _observe_turn(self, now: float) -> None:
        if self._last_turn_at is not None:
            self._turn_s += _TURN_SMOOTHING * (now - self._last_turn_at - self._turn_s)
        self._last_turn_at = now

    def _overloaded(self, message: str) -> Refused:
        retry_after_s = min(max(1.0, self.waiting * self._turn_s), RETRY_AFTER_MAX_S)
        reply = ErrorReply(code=ErrorCode.OVERLOADED, message=message, retryable=True, retry_after_s=retry_after_s)
        return Refused(reply)


def _refused(code: ErrorCode, message: str, *, retryable: bool) -> Refused:
    return Refused(ErrorReply(code=code, message=message, retryable=retryable))


def _session(request: RouteRequest, last: str, chosen: str) -> str | None:
    if request.session is None:
        return None
    return "new" if not last else "same" if last == chosen else "other"


def _pinned_gone(request: RouteRequest) -> Refused:
    message = f"the worker {request.pinned} that the request is bound to is not there"
    return _refused(ErrorCode.NO_WORKERS, message, retryable=False)
