"""The queue at work: those who wait are served as far as there is room, and sent away when their time is over."""

from collections.abc import Callable, Hashable
from functools import cache

import msgspec

from kvbus_router.core.choosing import Chooser
from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.limits import Limits
from kvbus_router.core.placing import Placed, Placer
from kvbus_router.core.policies import PolicyFailed
from kvbus_router.core.policy_classes import PolicyClasses
from kvbus_router.core.state import RouterState
from kvbus_router.core.turns import Turns
from kvbus_router.core.waiting import Item, WaitingRoom
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.router import RouteRequest

LOOK_S = 0.02
"""So often one of those that wait for a full worker is weighed anew."""


class Refused(msgspec.Struct, frozen=True):
    """``cause``: of a failure of the router itself."""

    reply: ErrorReply
    cause: Exception | None = None


class Settled(msgspec.Struct, frozen=True):
    """What became of a request that had waited."""

    request_id: str
    outcome: Placed | Refused


class QueueScheduler:
    """``classes`` may be changed at any time.

    `pump` is called hundreds of times a second (every worker reports four times), also when a thousand wait. So what waits costs
    next to nothing, where weighing the workers for one request costs up to milliseconds:

    - Times, and whether there is a worker at all that may take a request, are gone through only when the first time is up, or
      workers, their records or the cordons have changed.
    - Who waits for one worker is passed over while that one is full. Meanwhile another may have become better for it (it computes
      the prefix by now, say): so one of them, the one that was looked at longest ago, is weighed anew every `LOOK_S`.
    - What holds for all requests of the same class, worker or constraints is found once in a pass.
    """

    def __init__(
        self,
        state: RouterState,
        chooser: Chooser,
        placer: Placer,
        room: WaitingRoom,
        limits: Limits,
        classes: PolicyClasses,
        turns: Turns,
    ) -> None:
        self.classes = classes
        self._state = state
        self._chooser = chooser
        self._placer = placer
        self._room = room
        self._limits = limits
        self._turns = turns
        self._checked = self._constraints_as_of()
        self._next_look = 0.0

    def pump(self, now: float) -> list[Settled]:
        """Serve those who wait as far as there is room, and send away those whose time is over."""
        self._take_turns(now)
        if not self._room:
            return []
        settled = self._expire(now) if now >= self._room.due or self._checked != self._constraints_as_of() else []
        look_at = ""
        if now >= self._next_look:
            look_at, self._next_look = self._room.next_look(), now + LOOK_S
        for model in self._room.models:
            while (served := self._serve_next(model, look_at, now)) is not None:
                settled.append(served)
        return settled

    def may_run(self, flow: FlowKey) -> bool:
        """Whether its class and its tenant may have one more placed."""
        limits, shares, turns = self.classes.named(flow.policy_class), self._state.shares, self._turns
        running = shares.of_class(limits.name) + turns.of_class(limits.name)
        of_tenant = shares.of_flow(flow) + turns.of_flow(flow)
        return (not limits.max_running or running < limits.max_running) and (
            not limits.max_running_per_tenant or of_tenant < limits.max_running_per_tenant
        )

    def _take_turns(self, now: float) -> None:
        while self._state.ends:
            request_id, flow = self._state.ends.popleft()
            limits = self.classes.named(flow.policy_class)
            if limits.max_running or limits.max_running_per_tenant:
                self._turns.ended(request_id, flow, now)
        self._turns.advance(now)

    def _constraints_as_of(self) -> Hashable:
        """The same as long as whoever may take a request still may."""
        return self._state.changes, self._chooser.thresholds

    def _expire(self, now: float) -> list[Settled]:
        settled = []
        may_run: dict[Hashable, bool] = {}
        for item in list(self._room.items()):
            refused = self._check(item, _once(may_run, item.request, self._chooser.may_run), now)
            if refused is not None:
                self._room.remove(item.id)
                settled.append(Settled(item.id, refused))
        self._room.find_due()
        self._checked = self._constraints_as_of()
        return settled

    def _check(self, item: Item, may_run: bool, now: float) -> Refused | None:
        if item.deadline <= now:
            message = f"no worker had room for {now - item.arrived_at:.3g} s"
            return refused(ErrorCode.DEADLINE_EXCEEDED, message, retryable=False)
        if item.class_deadline <= now:
            message = f"class {item.policy_class.name} waits no longer than {item.policy_class.max_wait_s:g} s"
            return Refused(self._room.overloaded(message, len(self._room)))
        if item.waits_for and (item.waits_until <= now or not self._chooser.may_take(item.waits_for, item.request)):
            self._room.wait_for_any(item)
        if may_run:
            self._room.orphaned(item, None)
        elif item.request.pinned is not None:
            return pinned_gone(item.request)
        elif item.orphan_since is None:
            self._room.orphaned(item, now)
        elif now >= item.orphan_since + self._limits.worker_wait_s:
            return refused(ErrorCode.NO_WORKERS, f"no worker can take model {item.request.model}", retryable=True)
        return None

    def _serve_next(self, model: str, look_at: str, now: float) -> Settled | None:
        """Place the first in order that finds room. ``look_at``: it is weighed though the worker that it waits for is full."""
        queue = self._room.queue(model)
        if queue is None or not self._state.can_reserve():
            return None
        if not any(map(self._chooser.has_room, self._state.workers(model))):
            return None
        may_run, has_room_at = cache(self.may_run), cache(self._chooser.has_room_at)
        has_room: dict[Hashable, bool] = {}
        for waiting in queue.in_order(now):
            item = waiting.item
            if not may_run(item.flow):
                continue
            if item.waits_for and item.id != look_at and not has_room_at(item.waits_for):
                continue
            if item.inflight is not None and not _once(has_room, item.request, self._chooser.has_room_for):
                continue
            try:
                placed = self._placer.place(item, now)
            except PolicyFailed:
                raise
            except Exception as problem:
                return Settled(item.id, self.failed(item.id, problem))
            if placed is not None:
                self._room.take_turn(item, placed.chosen.uncached_tokens, now)
                return Settled(item.id, placed)
        return None

    def failed(self, request_id: str, problem: Exception) -> Refused:
        """Whatever it is about this request: neither those behind it pay for that, nor those that were placed in the same pass."""
        self._room.remove(request_id)
        self._state.give_up(request_id)
        reply = ErrorReply(code=ErrorCode.INTERNAL, message="the router has failed to place the request")
        return Refused(reply, problem)


def refused(code: ErrorCode, message: str, *, retryable: bool) -> Refused:
    return Refused(ErrorReply(code=code, message=message, retryable=retryable))


def pinned_gone(request: RouteRequest) -> Refused:
    message = f"the worker {request.pinned} that the request is bound to is not there"
    return refused(ErrorCode.NO_WORKERS, message, retryable=False)


def _once(found: dict[Hashable, bool], request: RouteRequest, ask: Callable[[RouteRequest], bool]) -> bool:
    """``ask``, once for all requests that may go to the same workers."""
    constraints = (request.pinned, request.allowed, request.excluded, request.required_taints)
    if constraints not in found:
        found[constraints] = ask(request)
    return found[constraints]
