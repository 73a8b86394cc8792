"""Places requests: at once when a worker has room and nobody waits before them, else in the order of the queue."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random

import msgspec

from kvbus_router.core.affinity import session_key
from kvbus_router.core.choosing import Chooser
from kvbus_router.core.limits import Limits, Thresholds, Weights
from kvbus_router.core.news import Heard
from kvbus_router.core.placing import Placed, Placer
from kvbus_router.core.policies import OnPolicyFailed, Outcome, PolicyFailed, RoutingPolicy, let_fail
from kvbus_router.core.policy_classes import PolicyClasses, Traits
from kvbus_router.core.scheduling import QueueScheduler, Refused, Settled, pinned_gone, refused
from kvbus_router.core.state import RouterState
from kvbus_router.core.turns import Turns
from kvbus_router.core.waiting import Item, WaitingRoom
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import Match
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, RouteExplanation, RouteRequest

__all__ = ["Dispatcher", "Placed", "Queued", "Refused", "Settled"]

ONE_CLASS = PolicyClasses()
PLACED_ELSEWHERE = "another router has placed the request"


class Queued(msgspec.Struct, frozen=True):
    """The outcome comes from a later `pump`."""


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
        classes: PolicyClasses = ONE_CLASS,
        policy_failed: OnPolicyFailed = let_fail,
    ) -> None:
        self.state = RouterState(limits, weights.expected_output_tokens)
        self.limits = limits
        self.room = WaitingRoom(limits)
        self._chooser = Chooser(self.state, limits, weights, policy, rng, policy_failed)
        self._placer = Placer(router_id, self.state, self._chooser, self.room, limits, weights, unix_ms)
        self._turns = Turns(router_id)
        self._scheduler = QueueScheduler(
            self.state, self._chooser, self._placer, self.room, limits, classes, self._turns
        )
        self.affinity = self._chooser.affinity
        self.decisions = self._placer.decisions

    # -- requests

    def submit(
        self, request: RouteRequest, matches: Sequence[Match], deadline: float, now: float
    ) -> tuple[Placed | Refused | Queued, list[Settled]]:
        """The outcome, and those of others (an earlier try of the same request that still waits, say)."""
        settled = self._withdraw(request.request_id) + self.pump(now)
        try:
            return self._admit(self._item(request, matches, deadline, now), now), settled
        except PolicyFailed:
            raise
        except Exception as problem:
            return self._scheduler.failed(request.request_id, problem), settled

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
        return [Settled(request_id, refused(ErrorCode.CANCELLED, message, retryable=False))]

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
        return self._turns.routers

    def set_routers(self, router_ids: Iterable[str]) -> None:
        """Which replicas there are (this one in any case): they take care not to choose the same worker at the same moment, nor to
        use the same place in a policy class."""
        self._turns.set_routers(router_ids)
        self._chooser.routers = self._turns.routers

    def set_classes(self, classes: PolicyClasses) -> None:
        """In force from now on; `pump` afterwards. Those who wait keep their place; what may run at a time is that of the class of
        the same name."""
        self._scheduler.classes = classes

    def explain(self, request: RouteRequest, matches: Sequence[Match], now: float) -> RouteExplanation:
        """What would become of the request now. Nothing is placed."""
        return self._placer.explain(self._item(request, matches, now, now), now)

    def explain_placed(self, request_id: str) -> RouteExplanation | None:
        """Why this router placed a request where it did; None when it does not know (any more)."""
        return self._placer.explain_placed(request_id)

    def pump(self, now: float) -> list[Settled]:
        """Serve those who wait as far as there is room, and send away those whose time is over."""
        return self._scheduler.pump(now)

    def next_due(self) -> float | None:
        """When `pump` must be called at the latest; None: never."""
        due = min(self.room.due, self._turns.due) if self.room else inf
        return due if due < inf else None

    def refuse_all(self, code: ErrorCode, message: str) -> list[Settled]:
        """The router stops: nobody waits any more."""
        return [Settled(item.id, refused(code, message, retryable=True)) for item in self.room.clear()]

    @property
    def prefix_waits(self) -> int:
        """Requests that have waited for a worker because it computes their prefix."""
        return self._placer.prefix_waits

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
        return Item(request, matches, deadline, now, self._scheduler.classes.of(traits), uncached)

    def _admit(self, item: Item, now: float) -> Placed | Refused | Queued:
        """After a `pump`: whoever waits now can use none of the room there is, or does not want to, so placing at once overtakes
        nobody."""
        request = item.request
        if item.deadline <= now:
            return refused(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed", retryable=False)
        if not self.state.can_reserve():
            return Refused(self.room.overloaded(f"{self.state.reservations} requests are placed", self.waiting))
        may_run = self._chooser.may_run(request)
        if not may_run and request.pinned is not None:
            return pinned_gone(request)
        if request.speculative and self.room.queue(request.model) is not None:
            return Refused(self.room.overloaded("others wait", self.waiting))
        placed = self._place(item, now)
        if placed is not None:
            return placed
        full = self.room.overloaded("no worker has room", self.waiting) if request.speculative else None
        refusal = full or self.room.refusal(item)
        if refusal is not None:
            self.room.wait_for_any(item)
            return Refused(refusal)
        item.orphan_since = None if may_run else now
        self.room.add(item)
        return Queued()

    def _withdraw(self, request_id: str) -> list[Settled]:
        self.state.withdraw(request_id)
        return self.leave_queue(request_id, "the request came again")

    def _place(self, item: Item, now: float) -> Placed | None:
        return self._placer.place(item, now) if self._scheduler.may_run(item.flow) else None
