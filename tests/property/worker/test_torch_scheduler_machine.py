"""The torch engine's scheduler against random arrivals, cancellations and shortage, with a stand-in for the computation."""

import random
from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import BlocksRemoved, BlocksStored, DirectiveRun, EngineRequest
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.scheduler import Limits, Scheduler
from kvbus_worker.engines.torch.sequence import StopRule, TokenSequence
from tests.property.worker.directive_runs import run_lists

SIZE, BLOCKS = 4, 10
CONTEXT = SIZE * BLOCKS
DOMAIN = b"d" * 32


class GenerousScheduler(Scheduler):
    """Admits whatever finds a slot: shortage in the middle of prefills, which admission avoids, must be survived, too."""

    def _fits(self, sequence: TokenSequence, matched: list[int], without: Collection[TokenSequence]) -> bool:
        running = [s for s in self._running if s not in without]
        fits_a_block = self._pool.available + self._pool.count_freed((s.table for s in without), matched) > len(matched)
        return not running or (len(running) < self._limits.max_num_seqs and fits_a_block)


class SchedulerMachine(RuleBasedStateMachine):
    """Each slot of the model's cache holds the token prefix whose KV was last computed into it, so wrong reuse is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.limits = Limits(block_size=SIZE, max_num_seqs=3, max_batched_tokens=7)
        self.scheduler = Scheduler(self.limits, self.pool)
        self.rule = StopRule((), CONTEXT)
        # what the cache's slots hold: the tokens whose KV was computed into them
        self.slots: dict[int, tuple[int, ...]] = {}
        self.known: dict[bytes, bytes] = {}
        self.arrivals = 0
        self.now_s = 0.0

    @initialize(generous=st.booleans())
    def choose_admission(self, generous: bool) -> None:
        kind = GenerousScheduler if generous else Scheduler
        self.scheduler = kind(self.limits, self.pool)

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, CONTEXT - 1),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        strict=st.integers(0, 1),
        directives=run_lists(BLOCKS),
    )
    def submit(
        self,
        stem: int,
        length: int,
        max_tokens: int,
        priority: int,
        strict: int,
        directives: tuple[DirectiveRun, ...],
    ) -> None:
        tokens = [stem * 7 % 5 + (i if i < 9 else i * stem) for i in range(length)]
        self.arrivals += 1
        request = EngineRequest(
            request_id=str(self.arrivals),
            tokens=tokens,
            domain_key=DOMAIN,
            sampling=Sampling(),
            stopping=Stopping(max_tokens=max_tokens),
            priority=priority,
            strict_priority=strict,
            directives=directives,
        )
        # Ten seconds apart, so that waiting makes up for a step of priority.
        self.scheduler.add(TokenSequence(request, self.rule, SIZE, self.arrivals, 10.0 * self.arrivals))

    @rule(choice=st.randoms(use_true_random=False))
    def cancel(self, choice: random.Random) -> None:
        sequences = self.scheduler.sequences()
        if sequences:
            self.scheduler.remove(choice.choice(sequences))

    @rule(keys=st.sets(st.integers(0, 30)))
    def drop(self, keys: set[int]) -> None:
        self.pool.drop([key for i, key in enumerate(self.known) if i in keys])
        self._follow_events()

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def step(self) -> None:
        if self.scheduler.has_work:
            self._step()

    @rule()
    def run_dry(self) -> None:
        """Everything finishes in a number of steps that its work and its preemptions explain: no circle of waiting."""
        steps = 0
        while self.scheduler.has_work:
            self._step()
            steps += 1
            assert steps < 10_000

    def _step(self) -> None:
        chunks = self.scheduler.plan(self.now_s)
        assert chunks, "a step without work"
        assert sum(chunk.count for chunk in chunks) <= self.limits.max_batched_tokens
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.computed
            assert chunk.samples == (chunk.start + chunk.count == len(sequence.tokens))
            self._check_context(sequence, chunk.start)
            for position in range(chunk.start, chunk.start + chunk.count):
                slot = sequence.table[position // SIZE] * SIZE + position % SIZE
                self.slots[slot] = tuple(sequence.tokens[: position + 1])
        for chunk in chunks:
            self.scheduler.computed(chunk)
            if chunk.samples:
                chunk.sequence.append(len(chunk.sequence.tokens) % 3, 0.0)
                if chunk.sequence.is_full():
                    self.scheduler.remove(chunk.sequence)
        self._follow_events()

    def _check_context(self, sequence: TokenSequence, end: int) -> None:
        for position in range(end):
            slot = sequence.table[position // SIZE] * SIZE + position % SIZE
            assert self.slots[slot] == tuple(sequence.tokens[: position + 1]), "reads KV of other tokens"

    def _follow_events(self) -> None:
        for event in self.pool.take_events():
            match event:
                case BlocksStored(parent, keys, tokens):
                    for key, packed in zip(keys, tokens, strict=True):
                        assert parent == ROOT or parent in self.known
                        assert chain_keys(DOMAIN, packed, SIZE, parent) == [key]
                        assert key not in self.known
                        self.known[key] = parent
                        parent = key
                case BlocksRemoved(keys):
                    for key in keys:
                        del self.known[key]
                        assert key not in self.known.values(), "removed before its children"

    @invariant()
    def the_books_agree(self) -> None:
        self.scheduler.check_integrity()
        self._follow_events()
        assert all(self.pool.contains(key) for key in self.known)
        if not self.scheduler.has_work:
            assert self.pool.used == 0
            assert self.scheduler.waiting_tokens == 0


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestScheduler = SchedulerMachine.TestCase
