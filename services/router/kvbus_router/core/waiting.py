"""Who waits for a worker, all models together: bounded as a whole, and by what policy classes and tenants may have waiting."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import msgspec

from kvbus_router.core.fairness import FlowKey
from kvbus_router.core.limits import Limits
from kvbus_router.core.policy_classes import PolicyClass
from kvbus_router.core.queue import WaitingQueue
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.indexer import Match
from kvbus_wire.router import RouteRequest

RETRY_AFTER_MAX_S = 60.0
# How much one more observation counts in the mean time between two requests that leave the queue.
_TURN_SMOOTHING = 0.1


class Item(msgspec.Struct):
    """One request on its way to a worker.

    ``deadline``: on the monotonic clock; ``class_deadline``: when its class has it wait no longer. ``uncached_tokens``: have to be
    computed wherever it runs. ``inflight``: blocks of its prompt by the worker that was seen to compute them (None: nobody has
    looked). ``orphan_since``: since when no worker there is may take it. ``waits_for``: the one worker that it waits for (the one
    that computes its prefix, or its session's), at most until ``waits_until``; ``ahead``: how many waited for that one before.
    """

    request: RouteRequest
    matches: Sequence[Match]
    deadline: float
    arrived_at: float
    policy_class: PolicyClass
    uncached_tokens: int
    inflight: Mapping[str, int] | None = None
    orphan_since: float | None = None
    waits_for: str = ""
    waits_until: float = inf
    ahead: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def flow(self) -> FlowKey:
        return FlowKey(self.policy_class.name, self.request.tenant)

    @property
    def class_deadline(self) -> float:
        limit_s = self.policy_class.max_wait_s
        return self.arrived_at + limit_s if limit_s > 0 else inf

    def due(self, worker_wait_s: float) -> float:
        """When its time is over, or that for which it waits for one worker. ``worker_wait_s``: how long one may be an orphan."""
        orphan_until = inf if self.orphan_since is None else self.orphan_since + worker_wait_s
        return min(self.deadline, self.class_deadline, orphan_until, self.waits_until)


class WaitingRoom:
    """``due``: no later than the first `Item.due`; may be earlier, since whoever leaves does not put it off."""

    def __init__(self, limits: Limits) -> None:
        self.due = inf
        self._limits = limits
        self._queues: dict[str, WaitingQueue[Item]] = {}
        self._flows: Counter[FlowKey] = Counter()
        self._classes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        # Of those that wait for one worker: how many for each, and all of them, by when they were last looked at.
        self._bound: Counter[str] = Counter()
        self._looked_at: dict[str, Item] = {}
        self._turn_s = 0.0
        self._last_turn_at: float | None = None

    def __len__(self) -> int:
        # A copy, because the thread that renders the metrics reads this, too.
        return sum(len(queue) for queue in list(self._queues.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in queue for queue in self._queues.values())

    @property
    def models(self) -> list[str]:
        return list(self._queues)

    def queue(self, model: str) -> WaitingQueue[Item] | None:
        return self._queues.get(model)

    def items(self) -> Iterator[Item]:
        for queue in self._queues.values():
            yield from queue.items()

    def of_class(self, name: str) -> int:
        return self._classes[name]

    # -- coming

    def refusal(self, item: Item) -> ErrorReply | None:
        """Why the request may not wait; None: it may."""
        limits, name = item.policy_class, item.policy_class.name
        if len(self) >= self._limits.max_queued:
            return self.overloaded(f"{len(self)} requests wait", len(self))
        if 0 < limits.max_waiting <= self._classes[name]:
            return self.overloaded(f"{limits.max_waiting} requests of class {name} wait", limits.max_waiting)
        if 0 < limits.max_waiting_tokens < self._tokens[name] + item.uncached_tokens and self._tokens[name]:
            message = f"requests of class {name} wait with {self._tokens[name]} tokens to compute"
            return self.overloaded(message, self._classes[name])
        waiting = self._flows[item.flow]
        if 0 < limits.max_waiting_per_tenant <= waiting:
            message = f"{waiting} requests of this tenant wait; class {name} allows no more"
            return self._come_back(ErrorCode.RATE_LIMITED, message, waiting)
        return None

    def add(self, item: Item) -> None:
        """Call only when there is no `refusal`."""
        limits, hints = item.policy_class, item.request.hints
        queue = self._queues.get(item.request.model)
        if queue is None:
            queue = self._queues[item.request.model] = WaitingQueue(
                self._limits.max_queued,
                self._limits.aging_per_s,
                self._limits.overdue_s,
                quantum_tokens=self._limits.fair_quantum_tokens,
                max_tenants=self._limits.max_tenants,
            )
        queue.add(
            item.id,
            item,
            strict_priority=limits.strict_priority_of(hints.strict_priority),
            priority=limits.priority_of(hints.effective_priority),
            now=item.arrived_at,
            flow=item.flow,
            weight=limits.weight,
        )
        self._flows[item.flow] += 1
        self._classes[limits.name] += 1
        self._tokens[limits.name] += item.uncached_tokens
        self._note_due(item)

    # -- waiting for one worker

    def ahead(self, item: Item, worker_id: str) -> int:
        """How many requests wait for the worker that the request would wait for, and come before it."""
        if item.waits_for == worker_id:
            return min(item.ahead, self._bound[worker_id] - 1)
        return self._bound[worker_id]

    def wait_for(self, item: Item, worker_id: str, until: float = inf) -> None:
        """The request was looked at, and waits for this worker. It may be about to `add` itself."""
        ahead = self.ahead(item, worker_id)
        self.wait_for_any(item)
        item.waits_for, item.waits_until, item.ahead = worker_id, until, ahead
        self._bound[worker_id] += 1
        self._looked_at[item.id] = item
        self._note_due(item)

    def wait_for_any(self, item: Item) -> None:
        if not item.waits_for:
            return
        self._bound[item.waits_for] -= 1
        if not self._bound[item.waits_for]:
            del self._bound[item.waits_for]
        del self._looked_at[item.id]
        item.waits_for, item.waits_until, item.ahead = "", inf, 0

    def next_look(self) -> str:
        """Of those that wait for one worker, the one that was looked at longest ago; its turn is over with that. Empty: nobody."""
        request_id = next(iter(self._looked_at), "")
        if request_id:
            self._looked_at[request_id] = self._looked_at.pop(request_id)
        return request_id

    # -- time

    def orphaned(self, item: Item, since: float | None) -> None:
        """There is no worker that may take the request, or (None) there is."""
        item.orphan_since = since
        self._note_due(item)

    def find_due(self) -> None:
        """Bring `due` up to date. Goes through all."""
        self.due = min((item.due(self._limits.worker_wait_s) for item in self.items()), default=inf)

    def _note_due(self, item: Item) -> None:
        self.due = min(self.due, item.due(self._limits.worker_wait_s))

    # -- leaving

    def remove(self, request_id: str) -> Item | None:
        """The request waits no more, whatever the reason."""
        for model, queue in self._queues.items():
            item = queue.remove(request_id)
            if item is not None:
                self._left(model, item)
                return item
        return None

    def take_turn(self, item: Item, tokens: int, now: float) -> None:
        """The request is served; ``tokens`` have to be computed for it."""
        model = item.request.model
        if self._last_turn_at is not None:
            self._turn_s += _TURN_SMOOTHING * (now - self._last_turn_at - self._turn_s)
        self._last_turn_at = now
        self._queues[model].take_turn(item.id, tokens)
        self._left(model, item)

    def clear(self) -> list[Item]:
        """Nobody waits any more; who did."""
        items = list(self.items())
        for item in items:
            self.remove(item.id)
        return items

    def _left(self, model: str, item: Item) -> None:
        self.wait_for_any(item)
        if not self._queues[model]:
            del self._queues[model]
        if not self._queues:
            # While nobody waits, no turn is late: the pause is not the pace of the queue.
            self._last_turn_at = None
            self.due = inf
        name = item.policy_class.name
        for counter, key, amount in (
            (self._classes, name, 1),
            (self._tokens, name, item.uncached_tokens),
        ):
            counter[key] -= amount
            if not counter[key]:
                del counter[key]
        self._flows[item.flow] -= 1
        if not self._flows[item.flow]:
            del self._flows[item.flow]

    # -- words for those who cannot stay

    def overloaded(self, message: str, ahead: int) -> ErrorReply:
        """``ahead``: how many requests have to leave first."""
        return self._come_back(ErrorCode.OVERLOADED, message, ahead)

    def _come_back(self, code: ErrorCode, message: str, ahead: int) -> ErrorReply:
        retry_after_s = min(max(1.0, ahead * self._turn_s), RETRY_AFTER_MAX_S)
        return ErrorReply(code=code, message=message, retryable=True, retry_after_s=retry_after_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        for queue in self._queues.values():
            queue.check_integrity()
            if not queue:
                raise AssertionError("an empty queue was kept")
        if len(self) > self._limits.max_queued:
            raise AssertionError("too many wait")
        flows, classes, tokens = Counter[FlowKey](), Counter[str](), Counter[str]()
        for item in self.items():
            flows[item.flow] += 1
            classes[item.policy_class.name] += 1
            tokens[item.policy_class.name] += item.uncached_tokens
        if (dict(flows), dict(classes)) != (dict(self._flows), dict(self._classes)) or +tokens != +self._tokens:
            raise AssertionError("those who wait are miscounted")
        if Counter(item.waits_for for item in self.items() if item.waits_for) != self._bound:
            raise AssertionError("those who wait for one worker are miscounted")
        if self._looked_at != {item.id: item for item in self.items() if item.waits_for}:
            raise AssertionError("somebody who waits for one worker would never be looked at")
        if any(item.due(self._limits.worker_wait_s) < self.due for item in self.items()):
            raise AssertionError("somebody's time is over before anybody looks")
