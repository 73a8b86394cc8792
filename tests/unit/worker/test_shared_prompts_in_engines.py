"""Requests that begin with the same new prefix compute it once, in both engines; the computed tokens are counted."""

from collections.abc import Callable, Sequence

import pytest

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.mock.scheduler import MockScheduler, SchedulerLimits
from kvbus_worker.engines.mock.speech import one_by_one
from kvbus_worker.engines.mock.timing import TimingModel
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.scheduler import Limits, Scheduler
from kvbus_worker.engines.torch.sequence import StopRule, TokenSequence

BLOCK, PREFIX, OWN, FOLLOWERS = 4, 40, 6, 7
STOPPING = Stopping(max_tokens=3)


def _request(name: str, tokens: Sequence[int], priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        tokens=tokens,
        domain_key=b"d" * 32,
        sampling=Sampling(),
        stopping=STOPPING,
        priority=priority,
    )


class _Mock:
    def __init__(self, max_batched_tokens: int) -> None:
        limits = SchedulerLimits(
            block_size=BLOCK,
            total_blocks=100,
            context_length=200,
            max_num_seqs=16,
            max_batched_tokens=max_batched_tokens,
            max_waiting=100,
        )
        self.scheduler = MockScheduler(limits, TimingModel())

    def add(self, request: EngineRequest) -> None:
        self.scheduler.submit(request, one_by_one([1, 2, 3], STOPPING, reason="length", eos=0), 0.0)

    @property
    def waiting_tokens(self) -> int:
        return self.scheduler.load().waiting_tokens

    def prefilled(self) -> int:
        tokens = 0
        while self.scheduler.has_work:
            tokens += self.step()
        return tokens

    def step(self) -> int:
        """Prompt tokens that were computed."""
        step = self.scheduler.begin(0.0)
        self.scheduler.finish(step, 0.0)
        self.scheduler.check_integrity()
        return step.work.prefill_tokens

    def steps_until(self, happened: Callable[[], bool]) -> int:
        steps = 0
        while not happened():
            self.step()
            steps += 1
        return steps

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Blocks come from elsewhere."""
        assert self.scheduler.cache.adopt(ROOT, keys, [bytes(4 * BLOCK)] * len(keys)) == len(keys)

    def computed(self, name: str) -> int:
        return self.scheduler._sequences[name].computed

    def has_output(self, name: str) -> bool:
        return self.scheduler._sequences[name].emitted > 0


class _Torch:
    def __init__(self, max_batched_tokens: int) -> None:
        limits = Limits(block_size=BLOCK, max_num_seqs=16, max_batched_tokens=max_batched_tokens)
        self.scheduler = Scheduler(limits, BlockPool(100))
        self.arrivals = 0

    def add(self, request: EngineRequest) -> None:
        self.arrivals += 1
        self.scheduler.add(TokenSequence(request, StopRule((), 200), BLOCK, self.arrivals, 0.0))

    @property
    def waiting_tokens(self) -> int:
        return self.scheduler.waiting_tokens

    def prefilled(self) -> int:
        tokens = 0
        while self.scheduler.has_work:
            tokens += self.step()
        return tokens

    def step(self) -> int:
        """Prompt tokens that were computed."""
        tokens = 0
        for chunk in self.scheduler.plan(0.0):
            decodes = chunk.sequence.output > 0
            tokens += 0 if decodes else chunk.count
            self.scheduler.computed(chunk)
            if chunk.samples:
                chunk.sequence.append(1, 0.0)
                if chunk.sequence.is_full():
                    self.scheduler.remove(chunk.sequence)
        self.scheduler.check_integrity()
        return tokens

    def steps_until(self, happened: Callable[[], bool]) -> int:
        steps = 0
        while not happened():
            self.step()
            steps += 1
        return steps

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Blocks come from elsewhere."""
        pool = self.scheduler._pool
        blocks = pool.allocate(len(keys))
        for number, parent, key in zip(blocks, [ROOT, *keys], keys, strict=False):
            pool.register(number, key, parent, bytes(4 * BLOCK))
        pool.release(blocks)

    def computed(self, name: str) -> int:
        return self._sequence(name).computed

    def has_output(self, name: str) -> bool:
        return self._sequence(name).output > 0

    def _sequence(self, name: str) -> TokenSequence:
        found = self.scheduler.get(name)
        assert found is not None
        return found


Bench = _Mock | _Torch


@pytest.fixture(params=[_Mock, _Torch])
def kind(request: pytest.FixtureRequest) -> type[Bench]:
    found: type[Bench] = request.param
    return found


@pytest.mark.parametrize("max_batched_tokens", [8, 64, 1000])
def test_a_fan_out_computes_its_prefix_once(kind: type[Bench], max_batched_tokens: int) -> None:
    bench = kind(max_batched_tokens)
    for follower in range(FOLLOWERS):
        bench.add(
            _request(f"agent{follower}", [*range(PREFIX), *range(100 * follower + 1000, 100 * follower + 1000 + OWN)])
        )
    assert bench.prefilled() == PREFIX + FOLLOWERS * OWN


def test_what_waits_counts_a_shared_prefix_once(kind: type[Bench]) -> None:
    bench = kind(1000)
    for follower in range(FOLLOWERS):
        bench.add(
            _request(f"agent{follower}", [*range(PREFIX), *range(100 * follower + 1000, 100 * follower + 1000 + OWN)])
        )
    assert bench.waiting_tokens == PREFIX + FOLLOWERS * OWN


def test_equal_prompts_compute_all_but_the_last_token_once(kind: type[Bench]) -> None:
    bench = kind(1000)
    for follower in range(FOLLOWERS):
        bench.add(_request(f"agent{follower}", range(PREFIX)))
    # A whole number of blocks: of the last one, which brings the output, each computes its own.
    assert bench.prefilled() == PREFIX + (FOLLOWERS - 1) * BLOCK


def test_who_computes_the_prefix_may_be_cancelled_and_another_takes_over() -> None:
    bench = _Mock(8)
    for follower in range(3):
        bench.add(_request(f"agent{follower}", [*range(PREFIX), *range(1000 + follower, 1000 + follower + OWN)]))
    first = bench.scheduler.begin(0.0)
    bench.scheduler.finish(first, 0.0)
    bench.scheduler.cancel("agent0")
    second = bench.scheduler.begin(0.0)
    bench.scheduler.finish(second, 0.0)
    done = first.work.prefill_tokens + second.work.prefill_tokens
    in_vain = second.work.prefill_tokens
    assert done + bench.prefilled() == PREFIX + 2 * OWN + in_vain


def test_a_more_urgent_prompt_is_not_held_up_by_a_long_one_that_has_begun(kind: type[Bench]) -> None:
    bench = kind(8)
    bench.add(_request("long", range(100), priority=-1))
    assert bench.steps_until(lambda: bench.computed("long") > 0) == 1
    bench.add(_request("urgent", range(1000, 1024)))
    assert bench.steps_until(lambda: bench.has_output("urgent")) == 3
    assert bench.computed("long") == 8
    bench.prefilled()


def test_an_urgent_request_waits_for_a_less_urgent_one_that_computes_its_prefix(kind: type[Bench]) -> None:
    bench = kind(8)
    bench.add(_request("first", range(PREFIX), priority=-1))
    begun = bench.steps_until(lambda: bench.computed("first") > 0) * 8
    bench.add(_request("urgent", [*range(PREFIX), *range(1000, 1000 + OWN)]))
    assert begun + bench.prefilled() == PREFIX + OWN


def test_what_is_imported_while_a_request_waits_is_not_expected_of_it_any_more(kind: type[Bench]) -> None:
    bench = kind(1000)
    prompt = [*range(PREFIX), *range(1000, 1000 + OWN)]
    bench.add(_request("waits", prompt))
    keys = chain_keys(b"d" * 32, pack_tokens(range(PREFIX)), BLOCK)
    bench.adopt(keys)
    assert bench.prefilled() == OWN
    prompts = bench.scheduler._prompts
    assert (list(prompts.announcers()), prompts.expected(keys, 0)) == ([], 0)
