"""What routing decisions let expect, apart from what events say.

A decision's chain counts as held by its worker from then on, until

    worker with events     events tell of its last block, or a moment after its first token, or the deadline
    worker without any     its time to live after the first token, or until that many blocks were sent there that it can hold
    either                 the request ends without a first token, or the worker is gone, restarts or clears its cache

Chains of several decisions overlap, so blocks are counted: one goes with the last decision that has it.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum

from kvbus_blocks.index import Owner, PrefixIndex
from kvbus_indexer.core.limits import Limits

_TIER = "g1"


class Ending(StrEnum):
    """Why a prediction ended."""

    CONFIRMED = "confirmed"
    EXPIRED = "expired"
    NOT_COMPUTED = "not_computed"
    MOVED = "moved"
    WORKER_FULL = "worker_full"
    TABLE_FULL = "table_full"
    WORKER_GONE = "worker_gone"
    WORKER_HEARD = "worker_heard"


class _Prediction:
    __slots__ = ("computed", "has_events", "keys", "model", "request_id", "until", "worker_id")

    def __init__(
        self, request_id: str, worker_id: str, model: str, keys: "array[int]", has_events: bool, until: float
    ) -> None:
        self.request_id = request_id
        self.worker_id = worker_id
        self.model = model
        self.keys = keys
        self.has_events = has_events
        self.until = until
        self.computed = False


class _Worker:
    """``uses``: how many predictions have a block. ``ends``: the predictions by the last block of their chain."""

    def __init__(self, model: str, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.predictions: dict[str, _Prediction] = {}
        self.uses: dict[int, int] = {}
        self.ends: dict[int, set[str]] = {}


class Predictions:
    """Times are monotonic seconds. Bounded by the keys of all predictions: at the limit the oldest go, which costs a guess."""

    def __init__(
        self, limits: Limits, make_index: Callable[[], PrefixIndex], ended: Callable[[Ending], None] = lambda _: None
    ) -> None:
        self._limits = limits
        self._make_index = make_index
        self._ended = ended
        self._live: dict[str, _Prediction] = {}
        self._workers: dict[str, _Worker] = {}
        self._indexes: dict[str, PrefixIndex] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._keys = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def keys(self) -> int:
        """Of all predictions; the memory grows with it."""
        return self._keys

    @property
    def entries(self) -> int:
        """Blocks, once per worker that is predicted to hold them."""
        return sum(len(worker.uses) for worker in list(self._workers.values()))

    def decided(
        self,
        request_id: str,
        worker_id: str,
        model: str,
        keys: Sequence[int],
        now: float,
        *,
        has_events: bool,
        capacity: int,
    ) -> None:
        """A request with this chain was sent to the worker, which can hold ``capacity`` blocks."""
        self.expire(now)
        self._end(request_id, Ending.MOVED)
        chain = array("Q", keys[: min(capacity, self._limits.max_predicted_keys)])
        if not chain:
            return
        worker = self._workers.get(worker_id)
        if worker is None or worker.model != model:
            self.drop(worker_id)
            worker = self._workers[worker_id] = _Worker(model, capacity)
        prediction = _Prediction(request_id, worker_id, model, chain, has_events, now + self._limits.predicted_ttl_s)
        self._live[request_id] = worker.predictions[request_id] = prediction
        self._keys += len(chain)
        for key in chain:
            worker.uses[key] = worker.uses.get(key, 0) + 1
        worker.ends.setdefault(chain[-1], set()).add(request_id)
        self._index(model).store(Owner(worker_id, _TIER), None, chain)
        self._schedule(prediction)
        while self._keys > self._limits.max_predicted_keys:
            self._end(next(iter(self._live)), Ending.TABLE_FULL)
        while len(worker.uses) > capacity:
            self._end(next(iter(worker.predictions)), Ending.WORKER_FULL)

    def first_token(self, request_id: str, now: float) -> None:
        """The chain is computed: the events will tell in a moment, or never."""
        prediction = self._live.get(request_id)
        if prediction is None or prediction.computed:
            return
        prediction.computed = True
        limits = self._limits
        prediction.until = now + (limits.confirm_s if prediction.has_events else limits.approximate_ttl_s)
        self._schedule(prediction)

    def finished(self, request_id: str) -> None:
        """The request has ended. Had it no first token, nothing can be said of its chain."""
        prediction = self._live.get(request_id)
        if prediction is not None and not prediction.computed:
            self._end(request_id, Ending.NOT_COMPUTED)

    def stored(self, worker_id: str, keys: Sequence[int]) -> None:
        """Events tell of these blocks."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        for key in keys:
            for request_id in tuple(worker.ends.get(key, ())):
                self._end(request_id, Ending.CONFIRMED)

    def drop(self, worker_id: str) -> None:
        """It is gone, or holds nothing more."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            for request_id in list(worker.predictions):
                self._end(request_id, Ending.WORKER_GONE)

    def heard(self, worker_id: str) -> None:
        """It has an event source after all: what was guessed for want of one is not needed."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            for request_id in [r for r, prediction in worker.predictions.items() if not prediction.has_events]:
                self._end(request_id, Ending.WORKER_HEARD)

    def match(self, model: str, keys: Sequence[int], now: float) -> dict[str, int]:
        """Per worker the most leading blocks of the chain that it is predicted to hold."""
        self.expire(now)
        index = self._indexes.get(model)
        return {} if index is None else {owner.instance_id: depth for owner, depth in index.match(keys).items()}

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            prediction = self._live.get(request_id)
            if prediction is not None and prediction.until <= now:
                self._end(request_id, Ending.EXPIRED)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Walks everything: for tests."""
        uses: dict[str, dict[int, int]] = {}
        for prediction in self._live.values():
            of_worker = uses.setdefault(prediction.worker_id, {})
            for key in prediction.keys:
                of_worker[key] = of_worker.get(key, 0) + 1
        if uses != {worker_id: worker.uses for worker_id, worker in self._workers.items()}:
            raise AssertionError("the uses are off")
        entries = sum(index.sizes().entries for index in self._indexes.values())
        if entries != sum(map(len, uses.values())) or any(index.sizes().orphans for index in self._indexes.values()):
            raise AssertionError("the indexes hold something else")
        if self._keys != sum(len(p.keys) for p in self._live.values()) or self._keys > self._limits.max_predicted_keys:
            raise AssertionError("the keys are off, or over the limit")
        if len(self._deadlines) > 2 * len(self._live) + 64:
            raise AssertionError("deadlines of what is gone pile up")

    def _index(self, model: str) -> PrefixIndex:
        index = self._indexes.get(model)
        if index is None:
            index = self._indexes[model] = self._make_index()
        return index

    def _schedule(self, prediction: _Prediction) -> None:
        heapq.heappush(self._deadlines, (prediction.until, prediction.request_id))
        self._compact()

    def _compact(self) -> None:
        """Deadlines of what has ended are left behind until they are more than the others."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [(p.until, p.request_id) for p in self._live.values()]
            heapq.heapify(self._deadlines)

    def _end(self, request_id: str, ending: Ending) -> None:
        prediction = self._live.pop(request_id, None)
        if prediction is None:
            return
        self._keys -= len(prediction.keys)
        worker = self._workers[prediction.worker_id]
        del worker.predictions[request_id]
        ends = worker.ends[prediction.keys[-1]]
        ends.discard(request_id)
        if not ends:
            del worker.ends[prediction.keys[-1]]
        gone = []
        for key in prediction.keys:
            worker.uses[key] -= 1
            if not worker.uses[key]:
                del worker.uses[key]
                gone.append(key)
        index = self._indexes[prediction.model]
        index.remove(Owner(prediction.worker_id, _TIER), gone)
        if not worker.predictions:
            del self._workers[prediction.worker_id]
        if not index.sizes().entries:
            del self._indexes[prediction.model]
        self._compact()
        self._ended(ending)
