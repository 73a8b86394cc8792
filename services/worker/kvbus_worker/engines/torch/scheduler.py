"""Which tokens of which sequences one step computes. Pure: the clock is passed in.

A step serves, within its token budget: decoding sequences (one token each), then prefills that have begun and waiting requests, by
rank (urgency and waiting, see `engines.ranking`). Room comes from free and cached blocks; when that is not enough

- a decoding sequence preempts the lowest ranked running one, itself at worst;
- a prefill or a waiting request preempts only what it outranks, and otherwise takes the room there is or waits.

Every step computes something. A prefill takes all budget or all room until it is done, so a second one begins before only where it
outranks the first, and may preempt it: room is never held by prefills that wait for each other. And one sequence alone
always fits, as the context length is cut to the pool.

A preempted sequence waits with its old rank; its full blocks stay cached, so that going on costs little.

A waiting request whose next block another sequence is computing in this very step waits for it instead of computing it again. It
holds nothing meanwhile and the other one moves on with each step, so nothing can wait in a circle.
"""

import bisect
from collections.abc import Collection
from operator import attrgetter

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_worker.engines.shared_prompts import SharedPrompts
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.sequence import State, TokenSequence

_rank = attrgetter("rank")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    """Compute ``count`` tokens of ``sequence`` from ``start`` on; ``samples``: they reach its end, so the next token follows."""

    sequence: TokenSequence
    start: int
    count: int
    samples: bool


class Scheduler:
    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._running: list[TokenSequence] = []
        self._waiting: list[TokenSequence] = []  # sorted by rank
        self._sequences: dict[str, TokenSequence] = {}
        self._prompts: SharedPrompts[TokenSequence] = SharedPrompts()
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        prefilling = sum(s.remaining for s in self._running if s.remaining > 1)
        return prefilling + sum(len(s.tokens) - s.expected_hit for s in self._waiting)

    def add(self, sequence: TokenSequence) -> None:
        reusable = sequence.keys[: sequence.reusable_blocks]
        expected = self._prompts.expected(reusable, len(self._pool.lookup(reusable)))
        sequence.expected_hit = expected * self._limits.block_size
        self._prompts.announce(sequence, sequence.keys[expected:])
        self._sequences[sequence.id] = sequence
        bisect.insort(self._waiting, sequence, key=_rank)

    def get(self, request_id: str) -> TokenSequence | None:
        return self._sequences.get(request_id)

    def sequences(self) -> list[TokenSequence]:
        return list(self._sequences.values())

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence in whatever state; what it computed stays cached."""
        del self._sequences[sequence.id]
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._prompts.leave(sequence, sequence.keys)
        else:
            self._running.remove(sequence)
            self._give_back(sequence)

    def clear(self) -> None:
        """Forget all sequences without touching the pool."""
        self._running, self._waiting = [], []
        self._sequences = {}
        self._prompts.clear()

    def plan(self, now_s: float) -> list[Chunk]:
        """Choose the step and allocate its blocks. Empty only when there is no work."""
        self._pool.now_s = now_s
        step = _Step(self._limits.max_batched_tokens)
        self._running.sort(key=_rank)
        self._plan_decodes(step)
        self._plan_prefills(step, now_s)
        self._plan_admissions(step, now_s, None)
        return [
            Chunk(sequence, sequence.computed, count, count == sequence.remaining)
            for sequence, count in step.counts.items()
        ]

    def computed(self, chunk: Chunk) -> None:
        """The KV of the chunk's tokens is in its blocks now: full blocks become reusable."""
        sequence, size = chunk.sequence, self._limits.block_size
        sequence.computed += chunk.count
        while (sequence.registered + 1) * size <= sequence.computed:
            index = sequence.registered
            key = sequence.key(index)
            parent = sequence.keys[index - 1] if index else ROOT
            tokens = sequence.block_tokens(index)
            sequence.table[index] = self._pool.register(
                sequence.table[index], key, parent, tokens, sequence.said[index]
            )
            sequence.registered += 1
            self._prompts.computed(sequence, key)

    def _plan_decodes(self, step: "_Step") -> None:
        for sequence in list(self._running):
            if step.budget == 0:
                return
            if sequence.state is not State.RUNNING or sequence.remaining != 1:
                continue
            while self._blocks_missing(sequence, 1) > self._pool.available:
                victim = self._running[-1]
                self._preempt(victim, step)
                if victim is sequence:
                    break
            else:
                self._schedule(sequence, 1, step)

    def _plan_prefills(self, step: "_Step", now_s: float) -> None:
        for sequence in list(self._running):
            if sequence.state is State.RUNNING and sequence.remaining > 1:
                self._plan_admissions(step, now_s, sequence)
            if step.budget == 0:
                return
            if sequence.state is not State.RUNNING or sequence.remaining == 1:
                continue
            wanted = min(sequence.remaining, step.budget)
            while self._blocks_missing(sequence, wanted) > self._pool.available:
                if not self._preempt_below(sequence, step):
                    break
            count = min(wanted, self._room(sequence))
            if count > 0:
                self._schedule(sequence, count, step)

    def _plan_admissions(self, step: "_Step", now_s: float, before: TokenSequence | None) -> None:
        """``before``: only those that come before this one, whose turn is next; others of its prompt wait for it all the same."""
        for sequence in list(self._waiting):
            if step.budget == 0 or (before is not None and before.rank < sequence.rank):
                return
            if sequence.state is not State.WAITING or self._is_being_computed(sequence.waits_for, step, before):
                continue
            matched = self._pool.lookup(sequence.keys[: sequence.reusable_blocks])
            sequence.waits_for = self._next_key(sequence, len(matched))
            if self._is_being_computed(sequence.waits_for, step, before):
                continue
            if not self._make_room_for(sequence, matched, step):
                return
            # a preemption may have let go of some, but cached blocks are only evicted by allocations
            self._waiting.remove(sequence)
            self._pool.acquire(matched)
            self._pool.use(matched, sequence.said.of(0, len(matched)))
            sequence.table = matched
            sequence.admit(len(matched) * self._limits.block_size, now_s)
            bisect.insort(self._running, sequence, key=_rank)
            # What came from elsewhere since it was announced (an import): nobody is going to say that it is computed.
            self._prompts.leave(
                sequence, sequence.keys[sequence.expected_hit // self._limits.block_size : len(matched)]
            )
            self._prompts.begin(sequence, sequence.keys[len(matched) :])
            self._schedule(sequence, min(sequence.remaining, step.budget, self._room(sequence)), step)

    def _make_room_for(self, sequence: TokenSequence, matched: list[int], step: "_Step") -> bool:
        """Whether the whole prompt fits beside what runs (the rest of each prompt, a block of growth for each output).

        What it outranks is preempted for it, as many as it takes, and none when all of them would not be enough.
        """
        lower = [s for s in self._running if sequence.rank.outranks(s.rank)]
        if not self._fits(sequence, matched, ()) and not (lower and self._fits(sequence, matched, lower)):
            return False
        while not self._fits(sequence, matched, ()):
            self._preempt(lower.pop(), step)
        return True

    def _fits(self, sequence: TokenSequence, matched: list[int], without: Collection[TokenSequence]) -> bool:
        running = [s for s in self._running if s not in without]
        if not running:
            return True
        total = -(-len(sequence.tokens) // self._limits.block_size)
        wanted = total - len(matched) + self._pool.count_cached(matched)
        growth = sum(1 if s.remaining == 1 else self._blocks_missing(s, s.remaining) for s in running)
        available = self._pool.available + self._pool.count_freed((s.table for s in without), matched)
        return len(running) < self._limits.max_num_seqs and wanted + growth <= available

    def _is_being_computed(self, key: bytes | None, step: "_Step", next_up: TokenSequence | None) -> bool:
        owner = None if key is None else self._prompts.owner(key)
        return owner is not None and (owner is next_up or owner in step.counts)

    @staticmethod
    def _next_key(sequence: TokenSequence, matched: int) -> bytes | None:
        """The first block that is not there, if another sequence could provide it."""
        return sequence.keys[matched] if matched < min(sequence.reusable_blocks, len(sequence.keys)) else None

    def _blocks_missing(self, sequence: TokenSequence, count: int) -> int:
        """Blocks to allocate before ``count`` more tokens can be computed."""
        return -(-(sequence.computed + count) // self._limits.block_size) - len(sequence.table)

    def _room(self, sequence: TokenSequence) -> int:
        """How many tokens the sequence could compute with the blocks there are."""
        return (len(sequence.table) + self._pool.available) * self._limits.block_size - sequence.computed

    def _schedule(self, sequence: TokenSequence, count: int, step: "_Step") -> None:
        missing = self._blocks_missing(sequence, count)
        if missing > 0:
            sequence.table += self._pool.allocate(missing, sequence.table[-1] if sequence.table else None)
        step.take(sequence, count)

    def _preempt_below(self, sequence: TokenSequence, step: "_Step") -> bool:
        """Preempt the lowest ranked of those running that the sequence outranks, if there is one."""
        victim = next((s for s in reversed(self._running) if sequence.rank.outranks(s.rank)), None)
        if victim is None:
            return False
        self._preempt(victim, step)
        return True

    def _preempt(self, victim: TokenSequence, step: "_Step") -> None:
        step.drop(victim)
        self._running.remove(victim)
        self._give_back(victim)
        victim.expected_hit = victim.registered * self._limits.block_size
        victim.computed = victim.registered = 0
        victim.state = State.WAITING
        bisect.insort(self._waiting, victim, key=_rank)
        self.preemptions += 1

    def _give_back(self, sequence: TokenSequence) -> None:
        self._prompts.leave(sequence, sequence.keys[sequence.registered :])
        self._pool.release(sequence.table)
        sequence.table = []

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not agree. Call between steps."""
        self._pool.check_integrity()
        held = {block for sequence in self._running for block in sequence.table}
        problems = {
            "used blocks are not those of the running sequences": self._pool.used != len(held),
            "too many sequences run": len(self._running) > self._limits.max_num_seqs,
            "the waiting are not in order": self._waiting != sorted(self._waiting, key=_rank),
            "a waiting sequence holds blocks": any(s.table or s.state is not State.WAITING for s in self._waiting),
            "a running sequence is not marked so": any(s.state is not State.RUNNING for s in self._running),
            "a sequence is lost": len(self._sequences) != len(self._running) + len(self._waiting),
            "an ended sequence is said to compute": any(s not in self._running for s in self._prompts.owners()),
            "an ended sequence is said to compute later": any(
                self._sequences.get(s.id) is not s for s in self._prompts.announcers()
            ),
        }
        for problem, is_so in problems.items():
            if is_so:
                raise AssertionError(problem)


class _Step:
    """The step being planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.counts: dict[TokenSequence, int] = {}

    def take(self, sequence: TokenSequence, count: int) -> None:
        self.counts[sequence] = count
        self.budget -= count

    def drop(self, sequence: TokenSequence) -> None:
        self.budget += self.counts.pop(sequence, 0)
