"""Places requests: at once when a worker has room and nobody waits before them, else in the order of the queue."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from random import Random

import msgspec

from kvbus_router.core.affinity import session_key
from kvbus_router.core.choosing import Chooser, Weighed
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.explaining import Decided, DecisionLog, explanation, ranked
from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.news import Heard
from kvbus_router.core.policies import Outcome, RoutingPolicy
from kvbus_router.core.policy_classes import PolicyClasses, Traits
from kvbus_router.core.queue import WaitingQueue
from kvbus_router.core.state import RouterState
from kvbus_router.core.waiting import Item, WaitingRoom
from kvbus_router.core.workers import Reservation
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.indexer import Match
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, Placement, RouteExplanation, RouteRequest

ONE_CLASS = PolicyClasses()
PLACED_ELSEWHERE = "another router has placed the request"


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


class Dispatcher:
    """``prefix_waits``: requests that have waited for a worker because it computes their prefix.

    Times are monotonic seconds, but ``unix_ms``, which dates decisions for the replicas. Call `pump` after everything that may
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
        classes: PolicyClasses = ONE_CLASS,
    ) -> None:
        self.state = RouterState(limits, weights.expected_output_tokens)
        self.limits = limits
        self.weights = weights
        self.decisions = DecisionLog(limits.max_explained_requests)
        self._router_id = router_id
        self._chooser = Chooser(self.state, limits, weights, policy, rng)
        self.affinity = self._chooser.affinity
        self._unix_ms = unix_ms
        self._classes = classes
        self.room = WaitingRoom(limits)
        self.prefix_waits = 0

    # -- requests

    def submit(
        self, request: RouteRequest, matches: Sequence[Match], deadline: float, now: float
    ) -> tuple[Placed | Refused | Queued, list[Settled]]:
        """The outcome, and those of others (an earlier try of the same request that still waits, say)."""
        settled = self._withdraw(request.request_id) + self.pump(now)
        return self._admit(self._item(request, matches, deadline, now), now), settled

    def finished(self, request_id: str) -> bool:
        """The request is over, or its client gone: its reservation or its place in the queue is free."""
        waited = self.room.remove(request_id) is not None
        return self.state.finished(request_id) or waited

    def give_up(self, request_id: str) -> bool:
        """Nobody waits for this router's answer any more. The request may go on at another one."""
        return self.room.remove(request_id) is not None or self.state.give_up(request_id)

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
        if self.room.remove(request_id) is None:
            return []
        return [Settled(request_id, _refused(ErrorCode.CANCELLED, message, retryable=False))]

    def joined(self, record: InstanceRecord, now: float) -> list[Settled]:
        """A record is new or has changed; see `RouterState.joined`."""
        self.state.joined(record, now)
        return self._placed_elsewhere([item.id for item in self.room.items()])

    def load_report(self, report: LoadReport, now: float) -> tuple[Heard, list[Settled]]:
        """A worker tells what it has. What runs there waits here in vain."""
        heard = self.state.load_report(report, now)
        return heard, self._placed_elsewhere(report.request_ids) if self.waiting else []

    def _placed_elsewhere(self, request_ids: Iterable[str]) -> list[Settled]:
        placed = [r for r in request_ids if r in self.room and self.state.reservation(r) is not None]
        return [settled for request_id in placed for settled in self.leave_queue(request_id, PLACED_ELSEWHERE)]

    def apply_decision(self, decision: Decision, now: float) -> tuple[Heard, list[Settled]]:
        """A replica has placed a request. If it waits here it does so in vain."""
        settled = self.leave_queue(decision.request_id, PLACED_ELSEWHERE)
        heard = self.state.apply_decision(decision, now)
        if heard in (Heard.APPLIED, Heard.EARLY):
            self.affinity.bind(
                session_key(decision.model, decision.tenant, decision.session_id),
                decision.worker_id,
                decided_ms=decision.decided_ms,
                router_id=decision.router_id,
                now=now,
            )
        return heard, settled

    # -- what can be changed, and asked

    @property
    def thresholds(self) -> Thresholds:
        return self._chooser.thresholds

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """In force from now on; `pump` afterwards, since there may be room now. Requests that are placed stay where they are."""
        self._chooser.thresholds = thresholds

    @property
    def routers(self) -> int:
        return self._chooser.routers

    def set_routers(self, count: int) -> None:
        """How many replicas there are, this one included: they take care not to choose the same worker at the same moment."""
        self._chooser.routers = max(1, count)

    def set_classes(self, classes: PolicyClasses) -> None:
        """In force from now on; `pump` afterwards. Those who wait keep their place; what may run at a time is that of the class of
        the same name."""
        self._classes = classes

    def explain(self, request: RouteRequest, matches: Sequence[Match], now: float) -> RouteExplanation:
        """What would become of the request now. Nothing is placed, and the policy is not asked: it may count its choices."""
        inflight = self.state.inflight.depths(request.keys, now)
        weighed = self._chooser.weigh(request, matches, inflight, now, everyone=True)
        return explanation(self._decided(request, weighed, None, 0.0), self._router_id)

    def explain_placed(self, request_id: str) -> RouteExplanation | None:
        """Why this router placed a request where it did; None when it does not know (any more)."""
        decided = self.decisions.get(request_id)
        return None if decided is None else explanation(decided, self._router_id)

    def pump(self, now: float) -> list[Settled]:
        """Serve those who wait as far as there is room, and send away those whose time is over."""
        return [settled for model in self.room.models for settled in self._pump_model(model, now)]

    def next_due(self) -> float | None:
        """When `pump` must be called at the latest."""
        times = []
        for item in self.room.items():
            times.append(item.deadline)
            if item.orphan_since is not None:
                times.append(item.orphan_since + self.limits.worker_wait_s)
            times += [until for until in (item.follows_until, item.class_deadline) if until is not None]
        return min(times, default=None)

    def refuse_all(self, code: ErrorCode, message: str) -> list[Settled]:
        """The router stops: nobody waits any more."""
        return [Settled(item.id, _refused(code, message, retryable=True)) for item in self.room.clear()]

    @property
    def waiting(self) -> int:
        return len(self.room)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self.room

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        self.state.check_integrity()
        self.room.check_integrity()
        if any(self.state.reservation(item.id) is not None for item in self.room.items()):
            raise AssertionError("a request waits and is placed")
        self.affinity.check_integrity()
        if len(self.decisions) > self.limits.max_explained_requests:
            raise AssertionError("too many decisions are kept")

    # -- inside

    def _item(self, request: RouteRequest, matches: Sequence[Match], deadline: float, now: float) -> Item:
        uncached = request.prompt_tokens
        known = next(self.state.workers(request.model), None)
        if known is not None:
            deepest = max((match.depth for match in matches), default=0)
            uncached = max(1, uncached - deepest * known.worker.model.block_size)
        traits = Traits(
            model=request.model,
            tenant=request.tenant,
            input_trigger=request.hints.input_trigger,
            is_sub_agent=request.session is not None and request.session.parent is not None,
            uncached_tokens=uncached,
        )
        return Item(request, matches, deadline, now, self._classes.of(traits), uncached)

    def _admit(self, item: Item, now: float) -> Placed | Refused | Queued:
        """After a `pump`: whoever waits now can use none of the room there is, or does not want to, so placing at once overtakes
        nobody."""
        request = item.request
        if item.deadline <= now:
            return _refused(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed", retryable=False)
        if not self.state.can_reserve():
            return Refused(self.room.overloaded(f"{self.state.reservations} requests are placed", self.waiting))
        may_run = self._chooser.may_run(request)
        if not may_run and request.pinned is not None:
            return _pinned_gone(request)
        if request.speculative and self.room.queue(request.model) is not None:
            return Refused(self.room.overloaded("others wait", self.waiting))
        placed = self._place(item, now)
        if placed is not None:
            return placed
        if request.speculative:
            return Refused(self.room.overloaded("no worker has room", self.waiting))
        refusal = self.room.refusal(item)
        if refusal is not None:
            return Refused(refusal)
        item.orphan_since = None if may_run else now
        self.room.add(item)
        return Queued()

    def _withdraw(self, request_id: str) -> list[Settled]:
        self.state.withdraw(request_id)
        return self.leave_queue(request_id, "the request came again")

    def _pump_model(self, model: str, now: float) -> list[Settled]:
        queue = self.room.queue(model)
        if queue is None:
            return []
        settled = self._expire(queue, now)
        while (served := self._serve_next(queue, model, now)) is not None:
            settled.append(served)
        return settled

    def _expire(self, queue: WaitingQueue[Item], now: float) -> list[Settled]:
        settled = []
        # Most requests have no constraints: who may take them is found once.
        may_run: dict[tuple[object, ...], bool] = {}
        for item in queue.items():
            request = item.request
            constraints = (request.pinned, request.allowed, request.excluded, request.required_taints)
            if constraints not in may_run:
                may_run[constraints] = self._chooser.may_run(request)
            refused = self._check_waiting(item, may_run[constraints], now)
            if refused is not None:
                self.room.remove(item.id)
                settled.append(Settled(item.id, refused))
        return settled

    def _check_waiting(self, item: Item, may_run: bool, now: float) -> Refused | None:
        if item.deadline <= now:
            message = f"no worker had room for {now - item.arrived_at:.3g} s"
            return _refused(ErrorCode.DEADLINE_EXCEEDED, message, retryable=False)
        if item.class_deadline is not None and item.class_deadline <= now:
            message = f"class {item.policy_class.name} waits no longer than {item.policy_class.max_wait_s:g} s"
            return Refused(self.room.overloaded(message, self.waiting))
        if may_run:
            item.orphan_since = None
        elif item.request.pinned is not None:
            return _pinned_gone(item.request)
        elif item.orphan_since is None:
            item.orphan_since = now
        elif now >= item.orphan_since + self.limits.worker_wait_s:
            return _refused(ErrorCode.NO_WORKERS, f"no worker can take model {item.request.model}", retryable=True)
        return None

    def _serve_next(self, queue: WaitingQueue[Item], model: str, now: float) -> Settled | None:
        """Place the first in order that finds room."""
        if not any(map(self._chooser.has_room, self.state.workers(model))) or not self.state.can_reserve():
            return None
        for waiting in queue.in_order(now):
            item = waiting.item
            if not self._may_run(item.flow):
                continue
            placed = self._place(item, now)
            if placed is not None:
                self.room.take_turn(item, placed.chosen.uncached_tokens, now)
                return Settled(item.id, placed)
        return None

    def _may_run(self, flow: FlowKey) -> bool:
        """Whether its class and its tenant may have one more placed."""
        limits, shares = self._classes.named(flow.policy_class), self.state.shares
        return (not limits.max_running or shares.of_class(limits.name) < limits.max_running) and (
            not limits.max_running_per_tenant or shares.of_flow(flow) < limits.max_running_per_tenant
        )

    def _place(self, item: Item, now: float) -> Placed | None:
        """None when no worker that may take it has room, or it is better off waiting."""
        request = item.request
        if not self._may_run(item.flow):
            return None
        has_room = self._chooser.has_room_for(request)
        if has_room or item.inflight is None:
            item.inflight = _deeper(item.inflight or {}, self.state.inflight.depths(request.keys, now))
        if not has_room:
            return None
        weighed = self._chooser.weigh(request, item.matches, item.inflight, now)
        if not weighed.estimates:
            return None
        chosen = self._chooser.choose(weighed.estimates)
        if self._follows(item, chosen, weighed.full, now):
            return None
        queued_s = now - item.arrived_at
        decided = self._decided(request, weighed, chosen, queued_s)
        self.decisions.add(decided)
        decision = self._decision(item, chosen)
        self._reserve(item, decision, chosen, now)
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

    def _follows(self, item: Item, chosen: Estimate, full: Sequence[Estimate], now: float) -> bool:
        """Whether it is predicted to cost less to wait until a full worker that computes the prompt's prefix has room, than to have
        it computed once more by the chosen one. Never for longer than ``follow_wait_s`` in all."""
        until = item.arrived_at + self.limits.follow_wait_s
        waits = [
            (self._cost_of_following(item, e), e.worker_id) for e in full if e.uncached_tokens < chosen.uncached_tokens
        ]
        cost_s, worker_id = min(waits, default=(inf, ""))
        may_wait = (
            now < until and not item.request.speculative and (item.id in self.room or not self.room.refusal(item))
        )
        if not may_wait or cost_s >= chosen.cost_s:
            self.room.unfollow(item)
            return False
        self.prefix_waits += not item.follows
        self.room.follow(item, worker_id, until)
        return True

    def _cost_of_following(self, item: Item, full: Estimate) -> float:
        """Those who wait for the same worker come before it, and each takes a slot for a while: about as long as it does itself,
        since they are of one fan-out."""
        worker = self.state.worker(full.worker_id)
        slots = 1 if worker is None else max(1, worker.worker.max_num_seqs)
        each_s = full.prefill_s + self._expected_output(item.request) * full.decode_step_s / slots
        return full.cost_s + self.room.ahead(item, full.worker_id) * each_s

    def _expected_output(self, request: RouteRequest) -> int:
        return min(request.hints.osl or self.weights.expected_output_tokens, request.max_tokens)

    def _decision(self, item: Item, chosen: Estimate) -> Decision:
        request, session = item.request, item.request.session
        return Decision(
            router_id=self._router_id,
            request_id=request.request_id,
            model=request.model,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            prompt_tokens=request.prompt_tokens,
            uncached_tokens=chosen.uncached_tokens,
            expected_output=self._expected_output(request),
            keys=request.keys,
            session_id=session.id if session is not None and not session.final else "",
            tenant=request.tenant,
            decided_ms=self._unix_ms(),
            policy_class=item.policy_class.name,
        )

    def _reserve(self, item: Item, decision: Decision, chosen: Estimate, now: float) -> None:
        request = item.request
        reservation = Reservation(
            request_id=decision.request_id,
            worker_id=decision.worker_id,
            incarnation=decision.incarnation,
            prompt_tokens=decision.prompt_tokens,
            uncached_tokens=decision.uncached_tokens,
            expected_output=decision.expected_output,
            placed_at=now,
            flow=item.flow,
            predicted=chosen,
            decided=(decision.decided_ms, decision.router_id),
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
            left_out=left_out + weighed.unseen,
        )


def _refused(code: ErrorCode, message: str, *, retryable: bool) -> Refused:
    return Refused(ErrorReply(code=code, message=message, retryable=retryable))


def _deeper(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    """What was once seen to be computed is on the worker afterwards, though the index is not asked again while a request waits."""
    return {worker: max(one.get(worker, 0), other.get(worker, 0)) for worker in {*one, *other}} if one else other


def _session(request: RouteRequest, last: str, chosen: str) -> str | None:
    if request.session is None:
        return None
    return "new" if not last else "same" if last == chosen else "other"


def _pinned_gone(request: RouteRequest) -> Refused:
    message = f"the worker {request.pinned} that the request is bound to is not there"
    return _refused(ErrorCode.NO_WORKERS, message, retryable=False)
