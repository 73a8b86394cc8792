"""The mock scheduler under random load: nothing is lost, nothing is counted twice, output depends on the prompt alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Ended
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import BlocksRemoved, BlocksStored, EngineError, EngineRequest
from kvbus_worker.engines.mock.scheduler import MockScheduler, SchedulerLimits
from kvbus_worker.engines.mock.speech import one_by_one, played
from kvbus_worker.engines.mock.timing import TimingModel
from kvbus_worker.engines.mock.vocabulary import made_up_tokens
from tests.property.worker.directive_runs import run_lists

BLOCK = 4
LIMITS = SchedulerLimits(
    block_size=BLOCK, total_blocks=12, context_length=48, max_num_seqs=3, max_batched_tokens=10, max_waiting=5
)
_SAID = (None, Directive("pinned", 0, None, "a"), Directive("ephemeral"))
WORDS = list(range(50, 90))

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
requests = st.tuples(prompts, st.integers(1, 12), st.integers(0, 2), st.booleans(), run_lists(12))
actions = st.lists(st.one_of(requests, st.integers(0, 9), st.none(), prompts), max_size=60)


class _Index:
    """What an observer of the block events believes."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def apply(self, events: tuple[object, ...]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent
                for key in event.keys:
                    assert key not in self.blocks
                    assert parent == b"" or parent in self.blocks
                    self.blocks[key] = parent
                    parent = key
            elif isinstance(event, BlocksRemoved):
                for key in event.keys:
                    del self.blocks[key]
                    assert key not in self.blocks.values()


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(1, 8), st.floats(0, 1))
def test_every_request_ends_once_with_its_own_output_whatever_the_load(
    script: list[object], max_repeats: int, interrupted: float
) -> None:
    scheduler = MockScheduler(LIMITS, TimingModel())
    index = _Index()
    expected: dict[str, list[int]] = {}
    output: dict[str, list[int]] = {}
    started: dict[str, int] = {}
    ended: dict[str, Ended] = {}
    now = 0.0

    def step() -> None:
        nonlocal now
        plan = scheduler.begin(now, max_repeats)
        plan = scheduler.shorten(plan, plan.duration_s * interrupted)
        assert plan.work.prefill_tokens + plan.work.decode_seqs <= LIMITS.max_batched_tokens
        now += plan.duration_s
        outcome = scheduler.finish(plan, now)
        index.apply(outcome.blocks)
        for begin in outcome.started:
            assert begin.request_id not in started
            started[begin.request_id] = begin.cached_tokens
        for delta in outcome.deltas:
            assert delta.request_id in started
            assert delta.start == len(output[delta.request_id])
            output[delta.request_id] += unpack_tokens(delta.tokens)
        for end in outcome.ended:
            assert end.request_id not in ended
            ended[end.request_id] = end
        scheduler.check_integrity()
        assert set(index.blocks) == {key for key in index.blocks if key in scheduler.cache}
        assert len(index.blocks) == scheduler.cache.cached

    for number, action in enumerate(script):
        if isinstance(action, tuple):
            prompt, length, priority, in_chunks, directives = action
            request_id = f"r{number}"
            tokens = made_up_tokens(prompt, WORDS, length)
            stopping = Stopping(max_tokens=40)
            pieces = [tokens[i : i + 3] for i in range(0, length, 3)]
            speech = (
                played(pieces, "stop", stopping, 1) if in_chunks else one_by_one(tokens, stopping, reason="stop", eos=1)
            )
            request = EngineRequest(
                request_id=request_id,
                tokens=prompt,
                domain_key=b"k" * 32,
                sampling=Sampling(),
                stopping=stopping,
                priority=priority,
                directives=directives,
            )
            if scheduler.load().waiting >= LIMITS.max_waiting:
                with pytest.raises(EngineError) as caught:
                    scheduler.submit(request, speech, now)
                assert caught.value.reply.code is ErrorCode.OVERLOADED
            else:
                scheduler.submit(request, speech, now)
                expected[request_id], output[request_id] = tokens, []
        elif isinstance(action, int):
            scheduler.cancel(f"r{action}")
        elif isinstance(action, list):
            keys = chain_keys(b"k" * 32, pack_tokens(action), BLOCK)
            if len(action) % 3 == 0:
                assert scheduler.cache.touch(keys) == scheduler.cache.leading(keys)
            elif len(action) % 3 == 1:
                scheduler.cache.drop(keys)
            else:  # from another engine, below what is there
                there = scheduler.cache.leading(keys) // 2
                said = [_SAID[token] for token in action[there : len(keys)]]
                parent = keys[there - 1] if there else ROOT
                came = scheduler.cache.adopt(parent, keys[there:], [b""] * len(keys[there:]), said)
                assert scheduler.cache.leading(keys) == there + came
            index.apply(scheduler.cache.take_events())
            scheduler.check_integrity()
        else:
            step()
    steps = 0
    while scheduler.has_work:
        step()
        steps += 1
        assert steps < 5000
    assert set(ended) == set(expected)
    for request_id, end in ended.items():
        assert end.usage.output_tokens == len(output[request_id])
        if end.reason == "stop":
            assert output[request_id] == expected[request_id]
            assert end.stop_token_id == 1
        else:
            assert end.reason == "cancelled"
            assert output[request_id] == expected[request_id][: len(output[request_id])]
    assert scheduler.cache.in_use == 0


def _times(arrivals: list[tuple[float, int, int]], max_repeats: int) -> dict[str, tuple[float, float]]:
    """When each request gets its first token and ends. ``arrivals``: time, prompt and output length."""
    limits = SchedulerLimits(
        block_size=BLOCK, total_blocks=500, context_length=200, max_num_seqs=3, max_batched_tokens=20, max_waiting=50
    )
    scheduler = MockScheduler(limits, TimingModel(decode_s_per_context_token=1e-4))
    first: dict[str, float] = {}
    ended: dict[str, float] = {}
    now, coming = 0.0, sorted(arrivals)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = coming[0][0]
        while coming and coming[0][0] <= now:
            _, prompt, length = coming.pop(0)
            number = len(arrivals) - len(coming)
            request = EngineRequest(
                request_id=f"r{number}",
                tokens=[number] * prompt,
                domain_key=b"k" * 32,
                sampling=Sampling(),
                stopping=Stopping(max_tokens=length),
            )
            speech = one_by_one(made_up_tokens([number], WORDS, length), request.stopping, reason="length", eos=None)
            scheduler.submit(request, speech, now)
        step = scheduler.begin(now, max_repeats)
        if coming:
            step = scheduler.shorten(step, coming[0][0] - now)
        now += step.duration_s
        outcome = scheduler.finish(step, now)
        scheduler.check_integrity()
        for delta in outcome.deltas:
            first.setdefault(delta.request_id, now)
        for end in outcome.ended:
            ended[end.request_id] = now
    return {request_id: (first[request_id], ended[request_id]) for request_id in ended}


arrivals = st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(2, 100))
def test_decode_steps_that_are_planned_together_take_what_they_take_one_by_one(
    requests: list[tuple[float, int, int]], max_repeats: int
) -> None:
    one_by_one, together = _times(requests, 1), _times(requests, max_repeats)
    assert len(one_by_one) == len(requests)
    assert together.keys() == one_by_one.keys()
    for request_id, times in together.items():
        assert times == pytest.approx(one_by_one[request_id], abs=1e-9)


@given(prompts, st.integers(0, 40), st.integers(0, 40))
def test_made_up_output_is_a_function_of_prompt_and_position(prompt: list[int], short: int, more: int) -> None:
    assert made_up_tokens(prompt, WORDS, short + more)[:short] == made_up_tokens(prompt, WORDS, short)
