"""Which work the torch engine does first, and what waits."""

from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.scheduler import Chunk, Limits, Scheduler
from kvbus_worker.engines.torch.sequence import StopRule, TokenSequence

SIZE = 4


class Bench:
    def __init__(self, blocks: int = 32, seqs: int = 4, budget: int = 16) -> None:
        self.pool = BlockPool(blocks)
        limits = Limits(block_size=SIZE, max_num_seqs=seqs, max_batched_tokens=budget)
        self.scheduler = Scheduler(limits, self.pool)
        self.now_s = 0.0
        self._arrivals = 0

    def add(self, name: str, tokens: range | list[int], max_tokens: int = 50, priority: int = 0) -> TokenSequence:
        self._arrivals += 1
        request = EngineRequest(
            request_id=name,
            tokens=list(tokens),
            domain_key=b"d" * 32,
            sampling=Sampling(),
            stopping=Stopping(max_tokens=max_tokens),
            priority=priority,
        )
        sequence = TokenSequence(request, StopRule((), 1000), SIZE, self._arrivals, self.now_s)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Plan and compute one step; tokens per request."""
        chunks: list[Chunk] = self.scheduler.plan(self.now_s)
        for chunk in chunks:
            self.scheduler.computed(chunk)
            if chunk.samples:
                chunk.sequence.append(9999, self.now_s)
        self.scheduler.check_integrity()
        return {chunk.sequence.id: chunk.count for chunk in chunks}


def test_decoding_goes_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    bench = Bench(budget=16)
    bench.add("a", range(10))
    assert bench.step() == {"a": 10}
    bench.add("b", range(100, 140))
    assert bench.step() == {"a": 1, "b": 15}
    assert bench.step() == {"a": 1, "b": 15}
    assert bench.step() == {"a": 1, "b": 10}
    assert bench.step() == {"a": 1, "b": 1}


def test_several_short_prompts_share_a_step() -> None:
    bench = Bench(budget=16)
    for i in range(4):
        bench.add(f"{i}", range(i * 100, i * 100 + 6))
    assert bench.step() == {"0": 6, "1": 6, "2": 4}
    assert bench.step() == {"0": 1, "1": 1, "2": 2, "3": 6}


def test_a_request_waits_for_a_prefix_that_is_being_computed_and_others_pass_it() -> None:
    bench = Bench(budget=16)
    bench.add("first", range(40))
    assert bench.step() == {"first": 16}
    same = bench.add("same", [*range(36), 77, 78])
    bench.add("other", range(500, 503))
    assert bench.step() == {"first": 16}
    assert bench.step() == {"first": 8, "other": 3}
    assert bench.step() == {"first": 1, "other": 1, "same": 2}
    assert same.cached_tokens == 36


def test_who_waits_for_a_prefix_computes_it_when_the_other_one_is_gone() -> None:
    bench = Bench(budget=8)
    first = bench.add("first", range(40))
    bench.step()
    second = bench.add("second", range(41))
    assert bench.step() == {"first": 8}
    bench.scheduler.remove(first)
    assert bench.step() == {"second": 8}
    assert second.cached_tokens == 16


def test_a_higher_priority_takes_the_slot_and_the_room_of_a_lower_one() -> None:
    bench = Bench(blocks=10, seqs=2)
    bench.add("low", range(12), priority=0)
    bench.add("lower", range(100, 110), priority=-1)
    bench.step()
    bench.step()
    bench.add("high", range(200, 214), priority=3)
    assert bench.step() == {"low": 1, "high": 14}
    assert bench.scheduler.preemptions == 1
    assert bench.scheduler.waiting == 1


def test_equal_priorities_never_preempt_each_other_for_a_new_request() -> None:
    bench = Bench(seqs=1)
    bench.add("a", range(5))
    bench.add("b", range(100, 105))
    for _ in range(5):
        assert set(bench.step()) == {"a"}
    assert bench.scheduler.preemptions == 0


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    bench = Bench(blocks=32, seqs=1, budget=16)
    low = bench.add("low", range(13))
    bench.step()
    high = bench.add("high", range(200, 204), priority=1)
    assert bench.step() == {"high": 4}
    bench.scheduler.remove(high)
    assert bench.step() == {"low": 2}  # 12 of 14 tokens lie in whole blocks
    assert low.cached_tokens == 0  # what it computed itself is no cache hit


def test_the_load_counts_what_is_still_to_be_computed() -> None:
    bench = Bench(budget=8)
    bench.add("a", range(20))
    bench.step()
    bench.add("b", range(100, 110))
    assert (bench.scheduler.running, bench.scheduler.waiting, bench.scheduler.waiting_tokens) == (1, 1, 12 + 10)
