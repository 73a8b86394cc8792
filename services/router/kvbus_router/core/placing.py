"""One request and a worker: who gets it, or for whom it is better off waiting."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from kvbus_router.core.affinity import session_key
from kvbus_router.core.choosing import Chooser, Weighed
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.explaining import Decided, DecisionLog, explanation, ranked
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.pairs import PairPlan, PairPlanner, in_place
from kvbus_router.core.state import RouterState
from kvbus_router.core.waiting import Item, WaitingRoom
from kvbus_router.core.workers import Reservation
from kvbus_wire.router import Decision, Placement, RouteExplanation, RouteRequest


class Placed(msgspec.Struct, frozen=True):
    """``decision``: the same for the replicas. ``chosen``: the terms of the worker that got it. ``session``: whether that one
    served the session's last request (same, other), or it had none (new); None without a session."""

    placement: Placement
    decision: Decision
    chosen: Estimate
    session: str | None = None


class Placer:
    """``prefix_waits``: requests that have waited for a worker because it computes their prefix. Times are monotonic seconds, but
    ``unix_ms``, which dates decisions for the replicas."""

    def __init__(
        self,
        router_id: str,
        state: RouterState,
        chooser: Chooser,
        room: WaitingRoom,
        limits: Limits,
        weights: Weights,
        unix_ms: Callable[[], int],
    ) -> None:
        self.decisions = DecisionLog(limits.max_explained_requests)
        self.prefix_waits = 0
        self._router_id = router_id
        self._state = state
        self._chooser = chooser
        self._room = room
        self._limits = limits
        self._weights = weights
        self._unix_ms = unix_ms
        self._pairs = PairPlanner(state.prefills, weights, limits.max_explained_workers)

    def place(self, item: Item, now: float) -> Placed | None:
        """Choose a worker and reserve it. None when no worker that may take the request has room, or it is better off waiting;
        if that is for one worker, it says so to the waiting room."""
        request = item.request
        has_room = self._chooser.has_room_for(request)
        if has_room or item.inflight is None:
            item.inflight = _deeper(item.inflight or {}, self._state.inflight.depths(request.keys, now))
        if not has_room:
            return None
        weighed = self._chooser.weigh(request, item.matches, item.inflight, now)
        if not weighed.estimates:
            if weighed.only:
                self._room.wait_for(item, weighed.only)
            return None
        chosen, policy = self._chooser.choose(weighed.estimates)
        if self._follows(item, chosen, weighed.full, now):
            return None
        queued_s = now - item.arrived_at
        pair = self._pair(request, weighed, chosen)
        weighed = msgspec.structs.replace(weighed, estimates=in_place(weighed.estimates, chosen, pair.chosen))
        chosen = pair.chosen
        decided = self._decided(item, weighed, policy, chosen, queued_s, pair)
        self.decisions.add(decided)
        decision = self._decision(item, pair)
        self._reserve(request, decision, chosen, now)
        placement = Placement(
            request_id=request.request_id,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            cached_tokens=chosen.cached_tokens,
            onboard_tokens=chosen.onboard_tokens,
            policy=policy,
            queued_s=queued_s,
            explanation=explanation(decided, self._router_id) if request.explain else None,
            prefill=pair.prefill,
        )
        return Placed(placement, decision, chosen, _session(request, weighed.session_worker_id, chosen.worker_id))

    def _pair(self, request: RouteRequest, weighed: Weighed, chosen: Estimate) -> PairPlan:
        return self._pairs.plan(
            request, chosen, self._state.roster(request.model), weighed.holders, self._chooser.thresholds
        )

    def explain(self, item: Item, now: float) -> RouteExplanation:
        """What would become of the request now. Nothing is placed, and the policy is not asked: it may count its choices."""
        inflight = self._state.inflight.depths(item.request.keys, now)
        weighed = self._chooser.weigh(item.request, item.matches, inflight, now, everyone=True)
        best = min(weighed.estimates, key=lambda each: each.cost_s, default=None)
        pair = self._pair(item.request, weighed, best) if best is not None else None
        return explanation(self._decided(item, weighed, self._chooser.policy, None, 0.0, pair), self._router_id)

    def explain_placed(self, request_id: str) -> RouteExplanation | None:
        decided = self.decisions.get(request_id)
        return None if decided is None else explanation(decided, self._router_id)

    def _follows(self, item: Item, chosen: Estimate, full: Sequence[Estimate], now: float) -> bool:
        """Whether it is predicted to cost less to wait until a full worker that computes the prompt's prefix has room, than to have
        it computed once more by the chosen one. Never for longer than ``follow_wait_s`` in all."""
        until = item.arrived_at + self._limits.follow_wait_s
        waits = [
            (self._cost_of_following(item, e), e.worker_id) for e in full if e.uncached_tokens < chosen.uncached_tokens
        ]
        cost_s, worker_id = min(waits, default=(inf, ""))
        may_wait = (
            now < until and not item.request.speculative and (item.id in self._room or not self._room.refusal(item))
        )
        if not may_wait or cost_s >= chosen.cost_s:
            self._room.wait_for_any(item)
            return False
        self.prefix_waits += not item.waits_for
        self._room.wait_for(item, worker_id, until)
        return True

    def _cost_of_following(self, item: Item, full: Estimate) -> float:
        """Those who wait for the same worker come before it, and each takes a slot for a while: about as long as it does itself,
        since they are of one fan-out."""
        worker = self._state.worker(full.worker_id)
        slots = 1 if worker is None else max(1, worker.worker.max_num_seqs)
        each_s = full.prefill_s + self._expected_output(item.request) * full.decode_step_s / slots
        return full.cost_s + self._room.ahead(item, full.worker_id) * each_s

    def _expected_output(self, request: RouteRequest) -> int:
        return min(request.hints.osl or self._weights.expected_output_tokens, request.max_tokens)

    def _decision(self, item: Item, pair: PairPlan) -> Decision:
        request, session, chosen = item.request, item.request.session, pair.chosen
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
            prefill_worker_id=pair.prefill.worker_id if pair.prefill is not None else "",
            prefill_tokens=pair.computed_tokens,
        )

    def _reserve(self, request: RouteRequest, decision: Decision, chosen: Estimate, now: float) -> None:
        self._state.reserve(
            Reservation.of(decision, now, predicted=chosen),
            decision.keys,
            decision.prefill_worker_id,
            decision.prefill_tokens,
        )
        if request.session is None:
            return
        affinity, key = self._chooser.affinity, session_key(request.model, request.tenant, request.session.id)
        if request.session.final:
            affinity.end(key)
            return
        affinity.bind(key, decision.worker_id, decided_ms=decision.decided_ms, router_id=decision.router_id, now=now)

    def _decided(
        self,
        item: Item,
        weighed: Weighed,
        policy: str,
        chosen: Estimate | None,
        queued_s: float,
        pair: PairPlan | None = None,
    ) -> Decided:
        request = item.request
        best, rejected, left_out = ranked(
            weighed.estimates, chosen, weighed.rejected, self._limits.max_explained_workers
        )
        return Decided(
            request_id=request.request_id,
            model=request.model,
            policy=policy,
            policy_class=item.policy_class.name,
            tenant=request.tenant,
            prompt_tokens=request.prompt_tokens,
            chosen=chosen,
            queued_s=queued_s,
            session_worker_id=weighed.session_worker_id,
            best=best,
            rejected=rejected,
            left_out=left_out + weighed.unseen,
            prefill_worker_id=pair.prefill.worker_id if pair is not None and pair.prefill is not None else "",
            prefill=pair.terms if pair is not None else (),
        )


def _deeper(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    """What was once seen to be computed is on the worker afterwards, though the index is not asked again while a request waits."""
    return {worker: max(one.get(worker, 0), other.get(worker, 0)) for worker in {*one, *other}} if one else other


def _session(request: RouteRequest, last: str, chosen: str) -> str | None:
    if request.session is None:
        return None
    return "new" if not last else "same" if last == chosen else "other"
