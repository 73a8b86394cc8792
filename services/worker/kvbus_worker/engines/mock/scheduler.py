"""Continuous batching without a model: a pure core under a clock that is passed in.

Each step feeds at most ``max_batched_tokens`` tokens: first one token of every decoding sequence, then prompt chunks of those that
run or are admitted now, by rank (urgency and waiting, see `engines.ranking`). A sequence that finds no room makes the
last of that order give its blocks up: it waits again and recomputes what is no longer cached. A request is admitted only when there
is room for its whole prompt, so admissions never cause preemptions.

A waiting request whose next block another sequence is computing in this very step waits for it instead of computing it again. It
holds nothing meanwhile and the other one moves on with each step, so nothing can wait in a circle.

A simulation need not plan each decode step anew: as long as nothing arrives, ends or is short of room, one is as the other. `begin`
plans as many as it is allowed to in one `Step`, and `shorten` cuts it when something arrives in the middle of it.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from operator import attrgetter

import msgspec

from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Delta, Ended, Started
from kvbus_worker.engines.base import EngineError, EngineLoad, EngineRequest, StepOutput
from kvbus_worker.engines.mock.block_cache import BlockCache
from kvbus_worker.engines.mock.sequence import Sequence
from kvbus_worker.engines.mock.speech import Speech
from kvbus_worker.engines.mock.text import Text, TokenText
from kvbus_worker.engines.mock.timing import StepWork, TimingModel
from kvbus_worker.engines.shared_prompts import SharedPrompts
from kvbus_worker.engines.step_rates import StepRates

_rank = attrgetter("rank")

_LONGEST_IDLE_STEP_S = 0.02
"""Of a step that only waits for output to be due: so long may a cancellation or a new request wait."""


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``pin_share``, ``lru``: see `BlockCache`."""

    block_size: int
    total_blocks: int
    context_length: int
    max_num_seqs: int
    max_batched_tokens: int
    max_waiting: int
    pin_share: float = 0.5
    lru: bool = False


class Step(msgspec.Struct, frozen=True):
    """A step under way: it ends ``duration_s`` after it began. ``planned``: sequences and how many tokens each feeds.

    ``repeats`` > 1: so many decode steps in a row, of which ``work`` is the first.
    """

    planned: tuple[tuple[Sequence, int], ...]
    duration_s: float
    work: StepWork
    repeats: int = 1


class MockScheduler:
    """``begin`` plans a step, ``finish`` applies it. Submissions and cancellations may come in between."""

    def __init__(self, limits: SchedulerLimits, timing: TimingModel) -> None:
        self.limits = limits
        self.cache = BlockCache(limits.total_blocks, limits.pin_share, lru=limits.lru)
        self._timing = timing
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._prompts: SharedPrompts[Sequence] = SharedPrompts()
        self._arrivals = 0
        self._rates = StepRates(
            timing.prior_prefill_tokens_per_s(limits.max_batched_tokens), timing.prior_decode_step_s()
        )
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._cancelled)

    def check(self, request: EngineRequest) -> None:
        """Raise EngineError for what cannot run."""
        length, limit = len(request.tokens), self.limits.context_length
        if request.request_id in self._sequences:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"request {request.request_id} runs already")
        if not length:
            raise EngineError(ErrorCode.INVALID_REQUEST, "the prompt is empty", param="tokens")
        if length >= limit:
            raise EngineError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {length} tokens, the context length is {limit}",
                prompt_tokens=length,
                context_length=limit,
            )
        if len(self._waiting) >= self.limits.max_waiting:
            raise EngineError(
                ErrorCode.OVERLOADED, "the waiting queue is full", retryable=True, max_waiting=self.limits.max_waiting
            )

    def submit(self, request: EngineRequest, speech: Speech, now: float, text: Text | None = None) -> None:
        """Queue a request. ``text``: of the length of the request's tokens, in their place. Raise EngineError as `check`."""
        self.check(request)
        room = self.limits.context_length - (len(request.tokens) - request.resumed)
        if len(speech.tokens) > room:
            ends = [min(end, room) for end in speech.ends[:room]]
            speech = msgspec.structs.replace(
                speech, tokens=speech.tokens[:room], ends=ends, reason="length", stop_token_id=None, error=None
            )
        if text is None:
            text = TokenText(request.tokens, request.domain_key, self.limits.block_size)
        sequence = Sequence(request, speech, text, self._arrivals, self.limits.block_size, now)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        keys = sequence.reusable_keys
        expected = self._prompts.expected(keys, self.cache.leading(keys))
        sequence.expected_hit = expected * self.limits.block_size
        self._prompts.announce(sequence, keys[expected:])
        self._wait(sequence)

    def cancel(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelled.append(sequence)

    def cancel_all(self) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def begin(self, now: float, max_repeats: int = 1) -> Step:
        self.cache.now_s = now
        planned: dict[str, tuple[Sequence, int]] = {}
        work = StepWork()
        budget = self.limits.max_batched_tokens
        preemptions = self.preemptions
        for sequence in [s for s in self._running if s.decoding and s.feedable(now)]:
            if budget and self._reserve(sequence, 1, planned):
                work.add_decode(sequence.computed)
                budget -= 1
        # What was just preempted would take the room back at once, so nobody is admitted in such a step.
        for sequence in [s for s in self._running if not s.decoding]:
            if self.preemptions == preemptions:
                budget = self._admit_some(now, planned, work, budget, before=sequence)
            new = min(sequence.feedable(now), budget)
            if new and self._reserve(sequence, new, planned):
                work.add_prefill(new, sequence.computed)
                budget -= new
        if self.preemptions == preemptions:
            budget = self._admit_some(now, planned, work, budget, before=None)
        repeats = 1
        only_decoding = 0 < len(planned) == work.decode_seqs == len(self._running)
        if max_repeats > 1 and only_decoding and self.preemptions == preemptions:
            repeats = self._repeats(max_repeats)
        duration_s = self._timing.decode_steps_s(work, repeats) or self._idle_s(now)
        return Step(tuple(planned.values()), duration_s, work, repeats)

    def shorten(self, step: Step, elapsed_s: float) -> Step:
        """``step`` without those repeats that begin at ``elapsed_s`` or later."""
        if step.repeats == 1 or elapsed_s >= step.duration_s:
            return step
        fewer = range(1, step.repeats)
        repeats = 1 + bisect_left(fewer, elapsed_s, key=lambda count: self._timing.decode_steps_s(step.work, count))
        duration_s = self._timing.decode_steps_s(step.work, repeats)
        return msgspec.structs.replace(step, repeats=repeats, duration_s=duration_s)

    def finish(self, step: Step, now: float) -> StepOutput:
        self.cache.now_s = now
        started: list[Started] = []
        deltas: list[Delta] = []
        ended: list[Ended] = []
        for sequence, new in step.planned:
            if sequence.cancelled:
                continue
            announcement = sequence.announce()
            if announcement is not None:
                started.append(announcement)
            if sequence.computed + new < len(sequence.text):
                self._advance(sequence, sequence.computed + new)
                continue
            computed = sequence.computed_after(new, step.repeats)
            stop_step = sequence.finished
            delta = sequence.emit(now, step.repeats)
            self._advance(sequence, computed)
            if delta is not None:
                deltas.append(delta)
            if sequence.finished and (stop_step or sequence.speech.stop_token_id is None):
                ended.append(sequence.said_all())
                self._leave(sequence)
        for sequence in self._cancelled:
            if self._sequences.get(sequence.request.request_id) is sequence:
                ended.append(sequence.ended("cancelled"))
                self._leave(sequence)
        self._cancelled.clear()
        self._rates.observe(step.work.prefill_tokens, step.work.decode_seqs, step.duration_s, step.repeats)
        return StepOutput(
            started=tuple(started), deltas=tuple(deltas), ended=tuple(ended), blocks=self.cache.take_events()
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(s.remaining_prefill for s in self._running)
            + sum(len(s.text) - s.expected_hit for s in self._waiting),
            used_blocks=self.cache.in_use,
            total_blocks=self.limits.total_blocks,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when sequences and blocks do not add up."""
        self.cache.check_integrity()
        held = sum(sequence.private for sequence in self._running)
        shared = {key for s in self._running for key in s.keys(s.published * self.limits.block_size)}
        if held + len(shared) != self.cache.in_use:
            raise AssertionError(
                f"{self.cache.in_use} blocks in use, {held} private and {len(shared)} shared are accounted for"
            )
        if any(sequence.held_blocks for sequence in self._waiting):
            raise AssertionError("a waiting sequence holds blocks")
        if any(sequence not in self._running for sequence in self._prompts.owners()):
            raise AssertionError("a sequence that does not run is said to compute")
        if any(self._sequences.get(s.request.request_id) is not s for s in self._prompts.announcers()):
            raise AssertionError("a sequence that has ended is said to compute later")

    def _wait(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_rank)

    def _admit_some(
        self,
        now: float,
        planned: dict[str, tuple[Sequence, int]],
        work: StepWork,
        budget: int,
        *,
        before: Sequence | None,
    ) -> int:
        """Begin with those that wait, in order, and return what is left of the budget. ``before``: only with those that come before
        this one, whose turn it is next; others of its prompt wait for it all the same."""
        for sequence in list(self._waiting):
            if not budget or len(self._running) >= self.limits.max_num_seqs:
                break
            if before is not None and before.rank < sequence.rank:
                break
            if sequence.cancelled or self._follows(sequence, planned, before):
                continue
            if not self._admit(sequence, now):
                break
            new = min(sequence.feedable(now), budget)
            self._reserve(sequence, new, planned)
            work.add_prefill(new, sequence.computed)
            budget -= new
        return budget

    def _follows(
        self, sequence: Sequence, planned: Mapping[str, tuple[Sequence, int]], next_up: Sequence | None
    ) -> bool:
        """Whether another sequence computes, in this very step, the block that this one needs next."""
        if self._is_being_computed(sequence.waits_for, planned, next_up):
            return True
        keys = sequence.reusable_keys
        matched = self.cache.leading(keys)
        sequence.waits_for = keys[matched] if matched < len(keys) else None
        return self._is_being_computed(sequence.waits_for, planned, next_up)

    def _is_being_computed(
        self, key: bytes | None, planned: Mapping[str, tuple[Sequence, int]], next_up: Sequence | None
    ) -> bool:
        owner = None if key is None else self._prompts.owner(key)
        return owner is not None and (owner is next_up or owner.request.request_id in planned)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        size = self.limits.block_size
        length = len(sequence.text)
        keys = sequence.reusable_keys
        matched = self.cache.acquire(keys, sequence.said)
        if not self.cache.can_allocate(length // size + 1 - matched):
            self.cache.let_go(keys[:matched])
            return False
        self._waiting.remove(sequence)
        sequence.admit(matched, now)
        sequence.running = True
        insort(self._running, sequence, key=_rank)
        # What came from elsewhere since it was announced (an import): nobody is going to say that it is computed.
        self._prompts.leave(sequence, keys[sequence.expected_hit // size : matched])
        self._prompts.begin(sequence, sequence.keys(length)[matched:])
        return True

    def _reserve(self, sequence: Sequence, new: int, planned: dict[str, tuple[Sequence, int]]) -> bool:
        """Room for ``new`` more tokens, by preempting from the end of the order if need be; False when that hits the sequence."""
        if not sequence.running:
            return False
        short = sequence.blocks_short(sequence.computed_after(new))
        while not self.cache.can_allocate(short):
            victim = self._running[-1]
            self._preempt(victim)
            planned.pop(victim.request.request_id, None)
            if victim is sequence:
                return False
        self.cache.allocate(short)
        sequence.private += short
        planned[sequence.request.request_id] = (sequence, new)
        return True

    def _repeats(self, most: int) -> int:
        """How many steps the running sequences, which all decode, can make until one of them ends; takes the room for them."""
        if not all(sequence.speech.even for sequence in self._running):
            return 1
        most = min(most, *(len(sequence.speech.tokens) - sequence.emitted for sequence in self._running))
        while most > 1:
            short = [sequence.blocks_short(sequence.computed_after(1, most)) for sequence in self._running]
            if self.cache.can_allocate(sum(short)):
                self.cache.allocate(sum(short))
                for sequence, count in zip(self._running, short, strict=True):
                    sequence.private += count
                return most
            most //= 2
        return 1

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._stop_running(sequence)
        self._wait(sequence)

    def _advance(self, sequence: Sequence, computed: int) -> None:
        """Account the computed tokens and publish the blocks that are full now."""
        sequence.computed = computed
        full = computed // self.limits.block_size
        if full > sequence.published:
            parent, keys, tokens = sequence.text.blocks(sequence.published, full)
            self.cache.publish(parent, keys, tokens, sequence.published, sequence.said)
            for key in keys:
                self._prompts.computed(sequence, key)
            sequence.private -= len(keys)
            sequence.published = full

    def _leave(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        if sequence.running:
            self._stop_running(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._prompts.leave(sequence, sequence.keys(len(sequence.text)))

    def _stop_running(self, sequence: Sequence) -> None:
        sequence.running = False
        self._running.remove(sequence)
        self.cache.release(sequence.keys(sequence.published * self.limits.block_size))
        self.cache.free(sequence.private)
        sequence.expected_hit = sequence.published * self.limits.block_size
        self._prompts.leave(sequence, sequence.keys(len(sequence.text))[sequence.published :])
        sequence.lose_blocks()

    def _idle_s(self, now: float) -> float:
        """How long a step without work lasts when output is not due yet."""
        held = [sequence.due_at - now for sequence in self._running if sequence.due_at > now]
        return min(*held, _LONGEST_IDLE_STEP_S) if held else 0.0
