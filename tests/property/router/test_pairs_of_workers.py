"""Pairs under whatever comes: workers that come, go and change their roles, reports, ends, and a replica that hears of it all."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import BUILT_IN
from kvbus_testkit.routing import chain, g1, report, request, worker_record

WORKERS = ["a", "b", "c", "d"]
ROLES = st.sampled_from(["both", "prefill", "decode"])
LATER = 1e9


class Pairs(RuleBasedStateMachine):
    placed = Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.routers = [
            Dispatcher(name, Limits(worker_wait_s=0.0), Weights(handover_s=0.0), BUILT_IN["kv"](), Random(1))
            for name in ("mine", "other")
        ]
        self.roles: dict[str, str] = {}
        self.now = 0.0
        self.count = 0
        self.open: dict[str, str] = {}

    @rule(worker=st.sampled_from(WORKERS), role=ROLES, ways=st.sampled_from([(), ("tcp",), ("shm", "tcp")]))
    def joins(self, worker: str, role: str, ways: tuple[str, ...]) -> None:
        self.roles[worker] = role
        record = worker_record(worker, role=role, transfers=ways, slots=3, host=worker)
        for router in self.routers:
            router.joined(record, self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def leaves(self, worker: str) -> None:
        self.roles.pop(worker, None)
        for router in self.routers:
            router.state.left(worker_record(worker))

    @rule(
        target=placed,
        blocks=st.integers(1, 200),
        seed=st.integers(0, 5),
        holder=st.sampled_from(WORKERS),
        depth=st.integers(0, 50),
    )
    def asks(self, blocks: int, seed: int, holder: str, depth: int) -> str:
        self.count += 1
        name = f"r{self.count}"
        keys = chain(*range(1000 * seed + 1, 1000 * seed + blocks + 1))
        asked = request(name, keys=keys, prompt_tokens=blocks * 16 + 3)
        matches = [g1(holder, min(depth, blocks))] if holder in self.roles else []
        outcome, _ = self.routers[0].submit(asked, matches, LATER, self.now)
        if not isinstance(outcome, Placed):
            self.routers[0].give_up(name)
            return name
        placement, decision = outcome.placement, outcome.decision
        self.routers[1].apply_decision(decision, self.now)
        assert self.roles[placement.worker_id] != "prefill"
        if placement.prefill is not None:
            prefill = placement.prefill
            assert prefill.worker_id != placement.worker_id
            both = (self.roles[prefill.worker_id], self.roles[placement.worker_id])
            assert both in (("prefill", "both"), ("prefill", "decode"), ("both", "decode"))
            assert 0 < prefill.tokens <= blocks * 16
            assert outcome.chosen.uncached_tokens < 16 + 3
            assert decision.prefill_tokens <= prefill.tokens
            self.open[name] = prefill.worker_id
        return name

    @rule(worker=st.sampled_from(WORKERS), waiting=st.integers(0, 5000), lists=st.booleans())
    def reports(self, worker: str, waiting: int, lists: bool) -> None:
        named = [name for name, prefill in self.open.items() if prefill == worker] if lists else []
        for router in self.routers:
            router.load_report(report(worker, waiting_tokens=waiting, prefills=named), self.now)

    @rule(name=placed)
    def says_something(self, name: str) -> None:
        for router in self.routers:
            router.first_token(name, self.now)
            assert name not in router.state.prefills._by_request

    @rule(name=consumes(placed))
    def ends(self, name: str) -> None:
        self.open.pop(name, None)
        for router in self.routers:
            router.finished(name)
            assert name not in router.state.prefills._by_request

    @rule(seconds=st.floats(0.1, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for router in self.routers:
            router.pump(self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        for router in self.routers:
            router.check_integrity()
            for worker in WORKERS:
                requests, tokens = router.state.prefills.on_top(worker)
                assert requests >= 0
                assert tokens >= 0
                assert not requests or worker in self.roles


TestPairs = Pairs.TestCase
TestPairs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
