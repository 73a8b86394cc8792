"""What every engine promises (see kvbus_worker.engines.base.Engine), run against each of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_blocks.retention import KINDS, Directive, Kind
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Ended, Started
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    DirectiveRun,
    Engine,
    EngineError,
    EngineRequest,
    StepOutput,
)

MakeEngine = Callable[..., Engine]

DOMAIN = b"d" * 32
SIZE = 16


class Recorder:
    """A sink that checks the order of events, follows the blocks as an index would, and lets tests wait."""

    def __init__(self) -> None:
        self.started: dict[str, Started] = {}
        self.ended: dict[str, Ended] = {}
        self.output: dict[str, list[int]] = {}
        self.first_start: dict[str, int] = {}
        self.order: list[str] = []
        self.blocks: dict[bytes, bytes] = {}  # key -> parent
        self.removed = 0
        self._changed = asyncio.Event()

    def __call__(self, step: StepOutput) -> None:
        for started in step.started:
            assert started.request_id not in self.started, "started twice"
            assert started.request_id not in self.ended, "started after its end"
            self.started[started.request_id] = started
            self.order.append(started.request_id)
        for delta in step.deltas:
            assert delta.request_id in self.started, "a delta before the start"
            assert delta.request_id not in self.ended, "a delta after the end"
            output = self.output.setdefault(delta.request_id, [])
            self.first_start.setdefault(delta.request_id, delta.start)
            assert delta.start == self.first_start[delta.request_id] + len(output), "a gap between deltas"
            output += unpack_tokens(delta.tokens)
        for ended in step.ended:
            assert ended.request_id not in self.ended, "ended twice"
            self.ended[ended.request_id] = ended
        self._follow_blocks(step)
        self._changed.set()

    def _follow_blocks(self, step: StepOutput) -> None:
        for event in step.blocks:
            match event:
                case BlocksStored(parent, keys, tokens):
                    assert len(keys) == len(tokens)
                    for key, packed in zip(keys, tokens, strict=True):
                        assert parent == ROOT or parent in self.blocks, "stored below a parent that is not there"
                        assert key not in self.blocks, "stored twice"
                        assert len(packed) == SIZE * 4
                        self.blocks[key] = parent
                        parent = key
                case BlocksRemoved(keys):
                    for key in keys:
                        del self.blocks[key]
                        assert key not in self.blocks.values(), "removed before its children"
                        self.removed += 1
                case BlocksCleared():
                    self.blocks.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, *request_ids: str) -> list[Ended]:
        await self.until(lambda: all(request_id in self.ended for request_id in request_ids))
        return [self.ended[request_id] for request_id in request_ids]


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    await engine.start(recorder)
    try:
        yield recorder
    finally:
        await engine.stop()


def request(
    request_id: str,
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    resumed: int = 0,
    priority: int = 0,
    domain_key: bytes = DOMAIN,
    stop_token_ids: tuple[int, ...] = (),
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        tokens=tokens,
        domain_key=domain_key,
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids),
        resumed=resumed,
        priority=priority,
    )


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 250), k=length)


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    return chain_keys(DOMAIN, pack_tokens(tokens), SIZE)


async def test_a_request_starts_once_streams_without_gaps_and_ends_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine) as recorder:
        engine.submit(request("a", prompt(1, 40), 10))
        (ended,) = await recorder.end_of("a")
    assert ended.reason == "length"
    assert len(recorder.output["a"]) == 10
    assert recorder.first_start["a"] == 0
    assert (ended.usage.prompt_tokens, ended.usage.output_tokens, ended.usage.cached_tokens) == (40, 10, 0)
    assert ended.error is None
    assert ended.stop_token_id is None


async def test_a_stop_token_ends_the_request_and_is_not_part_of_the_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine) as recorder:
        engine.submit(request("a", prompt(1, 20), 12))
        await recorder.end_of("a")
        output = recorder.output["a"]
        stop = output[5]
        engine.submit(request("b", prompt(1, 20), 12, stop_token_ids=(stop,)))
        (ended,) = await recorder.end_of("b")
    assert (ended.reason, ended.stop_token_id) == ("stop", stop)
    expected = output[: output.index(stop)]
    assert recorder.output.get("b", []) == expected
    assert ended.usage.output_tokens == len(expected)


async def test_a_migrated_request_goes_on_at_its_offset_and_counts_what_it_brought(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = prompt(2, 37)
    async with running(engine) as recorder:
        engine.submit(request("whole", tokens, 12))
        await recorder.end_of("whole")
        output = recorder.output["whole"]
        engine.submit(request("moved", tokens + output[:5], 12, resumed=5))
        (ended,) = await recorder.end_of("moved")
    assert recorder.first_start["moved"] == 5
    assert output[:5] + recorder.output["moved"] == output
    assert (ended.reason, ended.usage.prompt_tokens, ended.usage.output_tokens) == ("length", 37, 12)


async def test_a_migrated_request_that_has_all_its_output_ends_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine) as recorder:
        engine.submit(request("a", prompt(2, 30), 6, resumed=6))
        (ended,) = await recorder.end_of("a")
    assert (ended.reason, ended.usage.output_tokens) == ("length", 6)
    assert "a" not in recorder.output


async def test_whole_blocks_of_a_prompt_are_reused_and_one_token_is_left_to_compute(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = prompt(3, 4 * SIZE)
    async with running(engine) as recorder:
        engine.submit(request("a", tokens))
        await recorder.end_of("a")
        assert engine.cached_blocks(keys_of(tokens)) == 4
        engine.submit(request("same", tokens))
        engine.submit(request("longer", [*tokens, 11, 12]))
        engine.submit(request("other domain", tokens, domain_key=b"e" * 32))
        await recorder.end_of("same", "longer", "other domain")
    assert recorder.started["same"].cached_tokens == 3 * SIZE
    assert recorder.ended["same"].usage.cached_tokens == 3 * SIZE
    assert recorder.started["longer"].cached_tokens == 4 * SIZE
    assert recorder.started["other domain"].cached_tokens == 0
    assert recorder.output["same"] == recorder.output["a"]


async def test_the_next_turn_of_a_conversation_reuses_prompt_and_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = prompt(4, 37)
    async with running(engine) as recorder:
        engine.submit(request("first", first, 40))
        await recorder.end_of("first")
        told = first + recorder.output["first"]
        engine.submit(request("second", told + prompt(5, 9)))
        await recorder.end_of("second")
    # the last token's KV was never computed
    assert recorder.started["second"].cached_tokens == (len(told) - 1) // SIZE * SIZE


async def test_the_block_events_tell_exactly_what_is_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=24, context_length=256)
    prompts = [prompt(i % 7, 40 + 9 * (i % 7)) for i in range(30)]
    async with running(engine) as recorder:
        for i, tokens in enumerate(prompts):
            engine.submit(request(f"{i}", tokens, 1 + i % 20))
        await recorder.end_of(*(f"{i}" for i in range(30)))
        for tokens in prompts:
            keys = keys_of(tokens)
            followed = next((i for i, key in enumerate(keys) if key not in recorder.blocks), len(keys))
            assert engine.cached_blocks(keys) == followed
        assert recorder.removed > 0
        assert len(recorder.blocks) <= 24
        load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.used_blocks) == (0, 0, 0, 0)
    assert load.total_blocks == 24


async def test_requests_that_do_not_fit_together_all_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=9, context_length=144)
    async with running(engine) as recorder:
        for i in range(8):
            engine.submit(request(f"{i}", prompt(i, 40), 50))
        ended = await recorder.end_of(*(f"{i}" for i in range(8)))
    assert {event.reason for event in ended} == {"length"}
    assert {len(output) for output in recorder.output.values()} == {50}


async def test_the_context_length_ends_a_request(make_engine: MakeEngine) -> None:
    engine = make_engine(context_length=64)
    async with running(engine) as recorder:
        engine.submit(request("a", prompt(1, 60), 50))
        (ended,) = await recorder.end_of("a")
    assert (ended.reason, len(recorder.output["a"])) == ("length", 4)


async def test_what_cannot_run_is_refused_and_nothing_is_emitted(make_engine: MakeEngine) -> None:
    engine = make_engine(context_length=64)
    async with running(engine) as recorder:
        for tokens, code in (
            (prompt(1, 64), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
            ([], ErrorCode.INVALID_REQUEST),
        ):
            with pytest.raises(EngineError) as refused:
                engine.submit(request("a", tokens))
            assert refused.value.reply.code is code
            assert not refused.value.reply.retryable
        engine.submit(request("a", prompt(1, 8), 20))
        with pytest.raises(EngineError) as refused:
            engine.submit(request("a", prompt(1, 8), 20))
        assert refused.value.reply.code is ErrorCode.INVALID_REQUEST
        await recorder.end_of("a")
    assert len(recorder.ended) == 1


async def test_a_full_queue_refuses_and_says_that_later_is_better(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2, max_num_seqs=1)
    async with running(engine) as recorder:
        accepted = []
        refused = []
        for i in range(20):  # the loop does not run meanwhile, so none can begin
            try:
                engine.submit(request(f"{i}", prompt(i, 8), 2))
                accepted.append(f"{i}")
            except EngineError as error:
                refused.append(error.reply)
        await recorder.end_of(*accepted)
    assert {(reply.code, reply.retryable) for reply in refused} == {(ErrorCode.OVERLOADED, True)}
    assert len(accepted) in {2, 3}
    assert len(accepted) + len(refused) == 20


async def test_a_cancelled_request_ends_whether_it_runs_or_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    async with running(engine) as recorder:
        engine.submit(request("runs", prompt(1, 20), 400))
        engine.submit(request("waits", prompt(2, 20), 400))
        await recorder.until(lambda: bool(recorder.output.get("runs")))
        for request_id in ("waits", "runs", "runs", "unknown"):
            engine.cancel(request_id)
        ended = await recorder.end_of("runs", "waits")
        engine.submit(request("next", prompt(3, 20), 3))
        (last,) = await recorder.end_of("next")
        assert engine.load().used_blocks == 0
    assert [event.reason for event in ended] == ["cancelled", "cancelled"]
    assert ended[0].usage.output_tokens == len(recorder.output["runs"])
    assert "waits" not in recorder.started
    assert last.reason == "length"


async def test_stop_ends_every_request_and_nothing_runs_afterwards(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    async with running(engine) as recorder:
        for i in range(4):
            engine.submit(request(f"{i}", prompt(i, 20), 400))
        await recorder.until(lambda: len(recorder.started) == 2)
        await engine.stop()
        assert {event.reason for event in recorder.ended.values()} == {"cancelled"}
        assert len(recorder.ended) == 4
        await engine.stop()
        with pytest.raises(EngineError) as refused:
            engine.submit(request("late", prompt(1, 20)))
        assert refused.value.reply.retryable
        engine.cancel("0")
    assert len(recorder.ended) == 4


async def test_higher_priority_runs_first_then_who_came_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    async with running(engine) as recorder:
        engine.submit(request("running", prompt(0, 30), 30, priority=9))
        for name, priority in (("low", 0), ("high", 5), ("low too", 0), ("high too", 5)):
            engine.submit(request(name, prompt(priority, 20), 2, priority=priority))
        await recorder.end_of("running", "low", "high", "low too", "high too")
    assert recorder.order == ["running", "high", "high too", "low", "low too"]


async def test_blocks_move_to_another_engine_and_are_reused_there(make_engine: MakeEngine) -> None:
    source, target = make_engine(), make_engine()
    tokens = prompt(8, 5 * SIZE + 3)
    keys = keys_of(tokens)
    packed = [pack_tokens(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(5)]
    async with running(source) as sent, running(target) as received:
        source.submit(request("a", tokens, 20))
        await sent.end_of("a")
        size = source.info.block_bytes
        assert size == target.info.block_bytes > 0
        assert source.info.kv_layout == target.info.kv_layout
        data = [memoryview(bytearray(size)) for _ in range(6)]
        assert await source.export_blocks([*keys, b"?" * 16], data) == [True] * 5 + [False]

        missing_parent = await target.import_blocks(keys[0], keys[1:2], packed[1:2], data[1:2])
        assert missing_parent == 0
        assert await target.import_blocks(ROOT, keys[:2], packed[:2], [view.toreadonly() for view in data[:2]]) == 2
        assert await target.import_blocks(keys[1], keys[2:], packed[2:], data[2:5]) == 3
        assert await target.import_blocks(ROOT, keys, packed, data[:5]) == 5
        assert list(received.blocks) == keys
        assert target.cached_blocks(keys) == 5
        target.submit(request("a", tokens, 20))
        await received.end_of("a")
    assert received.started["a"].cached_tokens == 5 * SIZE
    assert received.output["a"] == sent.output["a"]


async def test_an_import_takes_only_room_that_nobody_uses(make_engine: MakeEngine) -> None:
    source, target = make_engine(), make_engine(total_blocks=8, context_length=128)
    tokens = prompt(9, 12 * SIZE)
    keys = keys_of(tokens)
    packed = [pack_tokens(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(12)]
    async with running(source) as sent, running(target) as received:
        source.submit(request("a", tokens, 1))
        await sent.end_of("a")
        data = [memoryview(bytearray(source.info.block_bytes)) for _ in range(12)]
        assert all(await source.export_blocks(keys, data))
        assert await target.import_blocks(ROOT, keys, packed, data) == 8
        target.submit(request("busy", prompt(10, 30), 90))
        await received.until(lambda: len(received.output.get("busy", ())) > 20)
        target.cancel("busy")
        await received.end_of("busy")
        assert target.cached_blocks(keys) < 8
        assert len(received.blocks) <= 8


async def test_whatever_is_submitted_and_cancelled_each_request_ends_once(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=12, context_length=160)
    rng = random.Random(7)
    async with running(engine) as recorder:
        ids = [f"{i}" for i in range(40)]
        for request_id in ids:
            tokens = prompt(rng.randrange(4), rng.randrange(1, 90))
            engine.submit(request(request_id, tokens, rng.randrange(1, 40), priority=rng.randrange(3)))
            if rng.random() < 0.3:
                engine.cancel(rng.choice(ids))
            if rng.random() < 0.5:
                await recorder.until(lambda: len(recorder.started) + len(recorder.ended) > 0)
                await asyncio.sleep(0)
        ended = await recorder.end_of(*ids)
        assert engine.load().used_blocks == 0
    assert {event.reason for event in ended} <= {"length", "cancelled"}
    assert sum(event.reason == "length" for event in ended) > 20


async def test_what_is_said_of_blocks_holds_for_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    lease = Directive("pinned", 0, None, "t")
    said = (DirectiveRun(0, 2, lease), DirectiveRun(3, None, Directive("ephemeral")))
    async with running(engine) as recorder:
        tokens = prompt(1, 100)
        engine.submit(msgspec.structs.replace(request("a", tokens, 40), directives=said))
        await recorder.end_of("a")
        keys = keys_of(tokens + recorder.output["a"])[:8]
        assert engine.directives(keys)[:2] == [lease, lease]
        assert [held.kind for held in engine.directives(keys)] == ["pinned"] * 2 + ["normal"] + ["ephemeral"] * 5
        assert engine.directives([b"x" * 16]) == [Directive()]
        engine.submit(request("b", tokens, 1))
        await recorder.end_of("b")
        # One who says nothing of them uses them, too.
        assert [held.kind for held in engine.directives(keys[:6])] == ["pinned"] * 2 + ["normal"] * 4


async def test_what_is_said_of_imported_blocks_holds_before_they_are_used(make_engine: MakeEngine) -> None:
    source, target = make_engine(), make_engine(total_blocks=24, pin_share=0.125)
    tokens = prompt(8, 6 * SIZE)
    keys = keys_of(tokens)
    packed = [pack_tokens(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(6)]
    lease, ephemeral = Directive("pinned", 0, None, "t"), Directive("ephemeral")
    async with running(source) as sent, running(target) as received:
        source.submit(request("a", tokens, 1))
        await sent.end_of("a")
        target.submit(request("older", prompt(7, 40), 1))
        await received.end_of("older")
        data = [memoryview(bytearray(source.info.block_bytes)) for _ in keys]
        assert await source.export_blocks(keys, data) == [True] * 6
        assert await target.import_blocks(ROOT, keys[:2], packed[:2], data[:2], [None, lease]) == 2
        said = [lease, lease, lease, ephemeral]
        assert await target.import_blocks(keys[1], keys[2:], packed[2:], data[2:], said) == 4
        # A tenant pins three blocks here; what is above that has a priority.
        kinds = [held.kind for held in target.directives(keys)]
        assert kinds == ["normal", "pinned", "pinned", "pinned", "normal", "ephemeral"]
        assert target.directives(keys)[4].priority > 0
        target.submit(request("needs one block", prompt(9, 16 * SIZE + 8), 1))
        await received.end_of("needs one block")
        assert target.cached_blocks(keys) == 5, "the ephemeral one goes first"
        assert target.cached_blocks(keys_of(prompt(7, 40))) == 2


async def test_touched_blocks_stay_longer_than_others(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=24)
    async with running(engine) as recorder:
        first, second = prompt(1, 100), prompt(2, 100)
        for name, tokens in (("a", first), ("b", second)):
            engine.submit(request(name, tokens, 1))
            await recorder.end_of(name)
        assert await engine.touch(keys_of(first), ()) == 6
        assert await engine.touch([b"x" * 16], ()) == 0
        engine.submit(request("c", prompt(3, 250), 1))
        await recorder.end_of("c")
        assert engine.cached_blocks(keys_of(first)) > engine.cached_blocks(keys_of(second))


async def test_dropped_blocks_go_children_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine) as recorder:
        tokens = prompt(1, 100)
        for name, other in (("a", tokens), ("b", tokens[:48] + prompt(2, 52))):
            engine.submit(request(name, other, 1))
            await recorder.end_of(name)
        keys = keys_of(tokens)
        assert await engine.drop_blocks([*keys[:3], b"x" * 16]) == 0, "others follow them"
        assert await engine.drop_blocks(keys) == 3
        assert engine.cached_blocks(keys) == 3
        assert recorder.removed == 3


async def test_blocks_in_use_are_not_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine) as recorder:
        tokens = prompt(1, 100)
        engine.submit(request("a", tokens, 300))
        await recorder.until(lambda: len(recorder.output.get("a", [])) > 0)
        assert await engine.drop_blocks(keys_of(tokens)) == 0
        engine.cancel("a")
        await recorder.end_of("a")


def _of_all(kind: Kind, tenant: str = "t") -> tuple[DirectiveRun, ...]:
    return (DirectiveRun(0, None, Directive(kind, 0, None, tenant)),)


async def test_ephemeral_blocks_go_first_and_pinned_ones_last(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=24)
    async with running(engine) as recorder:
        prompts = {kind: prompt(i, 100) for i, kind in enumerate(KINDS)}
        for kind in reversed(KINDS):  # the oldest is pinned
            engine.submit(msgspec.structs.replace(request(kind, prompts[kind], 1), directives=_of_all(kind)))
            await recorder.end_of(kind)
        engine.submit(request("d", prompt(8, 200), 1))
        await recorder.end_of("d")
        held = [engine.cached_blocks(keys_of(prompts[kind])) for kind in KINDS]
    assert held == [0, 5, 6]


async def test_a_tenant_pins_no_more_than_its_share_and_the_beginning_first(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=40, pin_share=0.25)
    async with running(engine) as recorder:
        for name, tenant, seed in (("a", "one", 1), ("b", "one", 2), ("c", "two", 3)):
            engine.submit(
                msgspec.structs.replace(request(name, prompt(seed, 100), 1), directives=_of_all("pinned", tenant))
            )
            await recorder.end_of(name)
        pinned = [
            [held.kind == "pinned" for held in engine.directives(keys_of(prompt(seed, 100))[:6])] for seed in (1, 2, 3)
        ]
    assert pinned == [[True] * 6, [True] * 4 + [False] * 2, [True] * 6]


async def test_pins_do_not_keep_requests_out(make_engine: MakeEngine) -> None:
    engine = make_engine(total_blocks=24, pin_share=1.0)
    async with running(engine) as recorder:
        for i in range(6):
            engine.submit(msgspec.structs.replace(request(str(i), prompt(i, 200), 1), directives=_of_all("pinned")))
            (ended,) = await recorder.end_of(str(i))
            assert ended.reason == "length"
