"""Sub-agents that begin at the same moment with one new prefix: router and engines together compute it once.

The router's core and the schedulers of the mock engine run under one clock, without an index: what is known of the prefix is what
the router knows of requests in flight. The prompt tokens that the engines compute are counted.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_blocks.keys import chain_keys
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import BUILT_IN
from kvbus_testkit.routing import MODEL, worker_record
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import AgentHints, Sampling, Stopping
from kvbus_wire.router import RouteRequest
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.mock.scheduler import MockScheduler, SchedulerLimits, Step
from kvbus_worker.engines.mock.speech import one_by_one
from kvbus_worker.engines.mock.timing import TimingModel

BLOCK, PREFIX, OWN, OUTPUT = 16, 8192, 10, 8
RATE = 1000.0
DOMAIN = b"d" * 32
FOREVER = 1e9


class Cluster:
    """Workers with ``slots`` each. Everything the router is told, it is told at once."""

    def __init__(self, workers: int, slots: int, policy: str = "kv", **limits: Any) -> None:
        self.dispatcher = Dispatcher("router", Limits(**limits), Weights(), BUILT_IN[policy](), Random(5))
        self.engines: dict[str, MockScheduler] = {}
        self.steps: dict[str, tuple[float, Step]] = {}
        self.prompts: dict[str, Sequence[int]] = {}
        self.computed = 0
        self.now = 0.0
        for number in range(workers):
            name = f"w{number}"
            self.dispatcher.state.joined(worker_record(name, slots=slots, rate=RATE))
            engine_limits = SchedulerLimits(
                block_size=BLOCK,
                total_blocks=10_000,
                context_length=100_000,
                max_num_seqs=slots,
                max_batched_tokens=512,
                max_waiting=1000,
            )
            timing = TimingModel(step_base_s=0.01, prefill_tokens_per_s=RATE)
            self.engines[name] = MockScheduler(engine_limits, timing)

    def ask(self, name: str, tokens: Sequence[int]) -> None:
        self.prompts[name] = tokens
        keys = b"".join(chain_keys(DOMAIN, pack_tokens(tokens), BLOCK))
        request = RouteRequest(
            request_id=name,
            model=MODEL,
            keys=keys,
            prompt_tokens=len(tokens),
            max_tokens=OUTPUT,
            deadline_ms=0,
            hints=AgentHints(osl=OUTPUT),
        )
        outcome, settled = self.dispatcher.submit(request, (), FOREVER, self.now)
        for one in settled:
            self._take(one.request_id, one.outcome)
        self._take(name, outcome)

    def run(self) -> None:
        """Until all is said."""
        while any(engine.has_work for engine in self.engines.values()) or self.dispatcher.waiting:
            for name, engine in self.engines.items():
                if name not in self.steps and engine.has_work:
                    step = engine.begin(self.now)
                    self.steps[name] = (self.now + step.duration_s, step)
            if self.steps:
                name = min(self.steps, key=lambda worker: self.steps[worker][0])
                self.now, step = self.steps.pop(name)
                self._finish(name, step)
            else:
                due = self.dispatcher.next_due()
                assert due is not None, "somebody waits for nothing"
                self.now = due
            for one in self.dispatcher.pump(self.now):
                self._take(one.request_id, one.outcome)
            self.dispatcher.check_integrity()

    def _take(self, name: str, outcome: Placed | Queued | Refused) -> None:
        assert not isinstance(outcome, Refused), outcome
        if isinstance(outcome, Queued):
            return
        stopping = Stopping(max_tokens=OUTPUT)
        request = EngineRequest(
            request_id=name,
            tokens=self.prompts[name],
            domain_key=DOMAIN,
            sampling=Sampling(),
            stopping=stopping,
        )
        speech = one_by_one(list(range(OUTPUT)), stopping, reason="length", eos=0)
        self.engines[outcome.placement.worker_id].submit(request, speech, self.now)

    def _finish(self, worker: str, step: Step) -> None:
        engine = self.engines[worker]
        self.computed += step.work.prefill_tokens
        output = engine.finish(step, self.now)
        for delta in output.deltas:
            self.dispatcher.first_token(delta.request_id, self.now)
        for ended in output.ended:
            self.dispatcher.finished(ended.request_id)
        load = engine.load()
        self.dispatcher.state.load_report(
            LoadReport(
                instance_id=worker,
                incarnation=1,
                model=MODEL,
                running=load.running,
                waiting=load.waiting,
                waiting_tokens=load.waiting_tokens,
                used_blocks=load.used_blocks,
                total_blocks=load.total_blocks,
                kv_seq=0,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                decode_step_s=load.decode_step_s,
                request_ids=tuple(engine._sequences),
            ),
            self.now,
        )


def agent(number: int) -> list[int]:
    return [*range(PREFIX), *range(100_000 + number * 100, 100_000 + number * 100 + OWN)]


@settings(max_examples=40, deadline=None)
@given(agents=st.integers(1, 20), workers=st.integers(1, 4), slots=st.integers(2, 8))
def test_a_fan_out_computes_its_prefix_once_however_many_workers_and_slots_there_are(
    agents: int, workers: int, slots: int
) -> None:
    cluster = Cluster(workers, slots, follow_wait_s=60.0)
    for number in range(agents):
        cluster.ask(f"agent{number}", agent(number))
    cluster.run()
    assert cluster.computed == PREFIX + agents * OWN


def test_without_knowledge_of_what_is_in_flight_it_is_computed_on_every_worker() -> None:
    """What the above is measured against."""
    cluster = Cluster(4, 8, policy="round-robin")
    for number in range(8):
        cluster.ask(f"agent{number}", agent(number))
    cluster.run()
    assert cluster.computed == 4 * PREFIX + 8 * OWN


@pytest.mark.parametrize("agents", [2, 8])
def test_waiting_for_the_prefix_takes_no_longer_than_computing_it_everywhere(agents: int) -> None:
    seconds = {}
    for policy in ("kv", "round-robin"):
        cluster = Cluster(agents, 8, policy=policy)
        for number in range(agents):
            cluster.ask(f"agent{number}", agent(number))
        cluster.run()
        seconds[policy] = cluster.now
    assert seconds["kv"] <= 1.1 * seconds["round-robin"]
