"""Predictions against a naive model: a list of decisions, walked for each question."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.limits import Limits
from kvbus_indexer.core.predictions import Predictions
from kvbus_testkit.instances import chain_to

LIMITS = Limits(max_predicted_keys=40, predicted_ttl_s=10.0, confirm_s=1.0, approximate_ttl_s=30.0)
CAPACITY = 16
MODEL_OF = {"w0": "m", "w1": "m", "w2": "other"}
requests = st.sampled_from([f"r{n}" for n in range(8)])
workers = st.sampled_from(sorted(MODEL_OF))
leaves = st.integers(1, 63)


class Decided:
    def __init__(self, worker: str, chain: list[int], has_events: bool, until: float) -> None:
        self.worker = worker
        self.chain = chain
        self.has_events = has_events
        self.until = until
        self.computed = False


class PredictionsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.predictions = Predictions(LIMITS, PlainIndex)
        self.model: dict[str, Decided] = {}

    @rule(request=requests, worker=workers, leaf=leaves, has_events=st.booleans())
    def decide(self, request: str, worker: str, leaf: int, has_events: bool) -> None:
        chain = chain_to(leaf)
        self.expire()
        self.model.pop(request, None)
        self.model[request] = Decided(worker, chain, has_events, self.now + 10.0)
        while sum(len(decided.chain) for decided in self.model.values()) > 40:
            del self.model[next(iter(self.model))]
        while len(self.blocks_of(worker)) > CAPACITY:
            del self.model[next(r for r, decided in self.model.items() if decided.worker == worker)]
        self.predictions.decided(
            request, worker, MODEL_OF[worker], chain, self.now, has_events=has_events, capacity=CAPACITY
        )

    @rule(request=requests)
    def first_token(self, request: str) -> None:
        decided = self.model.get(request)
        if decided is not None and not decided.computed:
            decided.computed = True
            decided.until = self.now + (1.0 if decided.has_events else 30.0)
        self.predictions.first_token(request, self.now)

    @rule(request=requests)
    def finished(self, request: str) -> None:
        if request in self.model and not self.model[request].computed:
            del self.model[request]
        self.predictions.finished(request)

    @rule(worker=workers, leaf=leaves, skip=st.integers(0, 5))
    def stored(self, worker: str, leaf: int, skip: int) -> None:
        keys = chain_to(leaf)[skip:]
        for request, decided in list(self.model.items()):
            if decided.worker == worker and decided.chain[-1] in keys:
                del self.model[request]
        self.predictions.stored(worker, keys)

    @rule(worker=workers, sure=st.integers(0, 2))
    def drop(self, worker: str, sure: int) -> None:
        if not sure:
            self.model = {r: decided for r, decided in self.model.items() if decided.worker != worker}
            self.predictions.drop(worker)

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(leaf=leaves, model=st.sampled_from(["m", "other", "none"]))
    def match(self, leaf: int, model: str) -> None:
        self.expire()
        chain, expected = chain_to(leaf), {}
        for worker in MODEL_OF:
            blocks = self.blocks_of(worker) if MODEL_OF[worker] == model else set()
            depth = next((i for i, block in enumerate(chain) if block not in blocks), len(chain))
            if depth:
                expected[worker] = depth
        assert self.predictions.match(model, chain, self.now) == expected

    def expire(self) -> None:
        self.model = {r: decided for r, decided in self.model.items() if decided.until > self.now}

    def blocks_of(self, worker: str) -> set[int]:
        return {block for decided in self.model.values() if decided.worker == worker for block in decided.chain}

    @invariant()
    def counts_and_limits_hold(self) -> None:
        self.predictions.check_integrity()
        assert self.predictions.keys <= 40


TestPredictions = PredictionsMachine.TestCase
TestPredictions.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
