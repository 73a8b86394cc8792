"""The mock engine as a whole: what it says, when, and which blocks it keeps."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_blocks.keys import chain_keys
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Ended
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import MockOutput, Sampling, Stopping
from kvbus_worker.engines.base import BlocksStored, EngineError, EngineRequest, StepOutput
from kvbus_worker.engines.mock import MockConfig, MockEngine, TimingModel, TokenizerVocabulary, block_data

DOMAIN = b"d" * 32
EOS = 258
TOKENIZER = load_tokenizer(byte_level_bundle())


class Recorder:
    """A sink that remembers, and lets tests wait for the end of requests."""

    def __init__(self) -> None:
        self.steps: list[StepOutput] = []
        self.ended: dict[str, Ended] = {}
        self._changed = asyncio.Event()

    def __call__(self, output: StepOutput) -> None:
        self.steps.append(output)
        for ended in output.ended:
            assert ended.request_id not in self.ended
            self.ended[ended.request_id] = ended
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self._changed.wait()

    async def end_of(self, *request_ids: str) -> list[Ended]:
        await self.until(lambda: all(request_id in self.ended for request_id in request_ids))
        return [self.ended[request_id] for request_id in request_ids]

    def tokens(self, request_id: str) -> list[int]:
        found: list[int] = []
        for step in self.steps:
            for delta in step.deltas:
                if delta.request_id == request_id:
                    found += unpack_tokens(delta.tokens)
        return found

    def deltas(self, request_id: str) -> list[tuple[int, list[int]]]:
        return [(d.start, unpack_tokens(d.tokens)) for s in self.steps for d in s.deltas if d.request_id == request_id]

    def cached(self, request_id: str) -> int:
        return next(s.cached_tokens for step in self.steps for s in step.started if s.request_id == request_id)


@asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[tuple[MockEngine, Recorder]]:
    config = MockConfig(timing=TimingModel(speedup=math.inf), total_blocks=64, eos_token_id=EOS)
    engine = MockEngine(msgspec.structs.replace(config, **fields), TokenizerVocabulary(TOKENIZER))
    recorder = Recorder()
    await engine.start(recorder)
    try:
        yield engine, recorder
    finally:
        await engine.stop()


def request(request_id: str = "r", tokens: list[int] | None = None, **fields: Any) -> EngineRequest:
    base = EngineRequest(
        request_id=request_id,
        tokens=list(range(40)) if tokens is None else tokens,
        domain_key=DOMAIN,
        sampling=Sampling(),
        stopping=Stopping(max_tokens=20),
    )
    return msgspec.structs.replace(base, **fields)


async def test_given_output_is_played_token_by_token_and_ends_with_eos() -> None:
    async with running() as (engine, recorder):
        engine.submit(request(mock=MockOutput(output="hé<|im_start|>!")))
        (ended,) = await recorder.end_of("r")
        expected = TOKENIZER.encode("hé<|im_start|>!", allow_special=True)
        assert recorder.deltas("r") == [(i, [token]) for i, token in enumerate(expected)]
        assert (ended.reason, ended.stop_token_id) == ("stop", EOS)
        assert (ended.usage.prompt_tokens, ended.usage.output_tokens) == (40, len(expected))


async def test_chunks_are_played_one_a_step() -> None:
    async with running() as (engine, recorder):
        engine.submit(request(mock=MockOutput(chunks=("ab", "c", "def"), finish="length")))
        (ended,) = await recorder.end_of("r")
        assert recorder.deltas("r") == [(0, [97, 98]), (2, [99]), (3, [100, 101, 102])]
        assert (ended.reason, ended.stop_token_id) == ("length", None)


async def test_empty_output_ends_at_once() -> None:
    async with running() as (engine, recorder):
        engine.submit(request(mock=MockOutput(output="")))
        (ended,) = await recorder.end_of("r")
        assert (ended.reason, ended.usage.output_tokens, recorder.tokens("r")) == ("stop", 0, [])


async def test_a_script_speaks_turn_by_turn(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"output": "first"}\n{"match": "harbour", "output": "boats"}\n')
    async with running(script=str(script)) as (engine, recorder):
        engine.submit(request("a", TOKENIZER.encode("hello")))
        engine.submit(request("b", TOKENIZER.encode("the harbour?")))
        await recorder.end_of("a", "b")
        assert TOKENIZER.decode(recorder.tokens("a")) == "first"
        assert TOKENIZER.decode(recorder.tokens("b")) == "boats"


async def test_a_speculative_request_takes_no_line_of_the_script(tmp_path: Path) -> None:
    async with running(script=_script(tmp_path, {"output": "first"})) as (engine, recorder):
        engine.submit(request("guess", TOKENIZER.encode("hello"), speculative=True, stopping=Stopping(max_tokens=1)))
        engine.submit(request("real", TOKENIZER.encode("hello")))
        guess, _ = await recorder.end_of("guess", "real")
        assert (guess.reason, guess.usage.output_tokens) == ("length", 1)
        assert TOKENIZER.decode(recorder.tokens("real")) == "first"


def _script(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = tmp_path / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


async def test_a_scripted_error_without_output_refuses_the_request(tmp_path: Path) -> None:
    error = {"code": "overloaded", "message": "full", "retry_after_s": 2}
    async with running(script=_script(tmp_path, {"error": error}, {"output": "ok"})) as (engine, recorder):
        with pytest.raises(EngineError) as caught:
            engine.submit(request())
        reply = caught.value.reply
        assert (reply.code, reply.message, reply.retry_after_s, reply.retryable) == (
            ErrorCode.OVERLOADED, "full", 2.0, False,
        )  # fmt: skip
        engine.submit(request())
        [ended] = await recorder.end_of("r")
        assert ended.reason == "stop"


@pytest.mark.parametrize(("max_tokens", "reason"), [(20, "error"), (3, "length")])
async def test_a_scripted_error_comes_behind_the_output_unless_that_ends_before(
    tmp_path: Path, max_tokens: int, reason: str
) -> None:
    line = {"output": "half", "error": {"code": "internal", "message": "broken"}}
    async with running(script=_script(tmp_path, line)) as (engine, recorder):
        engine.submit(request(stopping=Stopping(max_tokens=max_tokens)))
        [ended] = await recorder.end_of("r")
        assert TOKENIZER.decode(recorder.tokens("r")) == "half"[:max_tokens]
        assert ended.reason == reason
        assert (ended.error.message if ended.error else None) == ("broken" if reason == "error" else None)


async def test_a_request_is_cancelled_while_its_scripted_prefill_lasts(tmp_path: Path) -> None:
    line = {"match": "tide", "output": "late", "prefill_s": 3600}
    async with running(script=_script(tmp_path, line, {"output": "soon"})) as (engine, recorder):
        engine.submit(request("slow", tokens=TOKENIZER.encode("the tide")))
        await recorder.until(lambda: any(step.started for step in recorder.steps))
        engine.submit(request("fast", tokens=[1, 2, 3]))
        [ended] = await recorder.end_of("fast")
        assert ended.reason == "stop"
        assert engine.load().running == 1
        engine.cancel("slow")
        [ended] = await recorder.end_of("slow")
        assert (ended.reason, recorder.tokens("slow"), engine.load().used_blocks) == ("cancelled", [], 0)


async def test_a_bad_script_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    engine = MockEngine(MockConfig(script=str(tmp_path / "none")), TokenizerVocabulary(TOKENIZER))
    with pytest.raises(EngineError) as caught:
        await engine.start(Recorder())
    assert caught.value.reply.param == "script"


async def test_made_up_output_is_equal_on_every_engine_and_goes_on_after_a_migration() -> None:
    stopping = Stopping(max_tokens=30, ignore_eos=True)
    async with running() as (first, seen_first), running(block_size=8) as (second, seen_second):
        first.submit(request(stopping=stopping))
        (ended,) = await seen_first.end_of("r")
        whole = seen_first.tokens("r")
        assert (len(whole), ended.reason) == (30, "length")
        prompt = list(range(40))
        second.submit(request(tokens=prompt + whole[:11], resumed=11, stopping=stopping))
        (resumed,) = await seen_second.end_of("r")
        assert seen_second.tokens("r") == whole[11:]
        assert seen_second.deltas("r")[0][0] == 11
        assert (resumed.usage.prompt_tokens, resumed.usage.output_tokens) == (40, 30)
        text = TOKENIZER.decode(whole)
        assert text.isascii()
        assert text.replace(" ", "").isalpha()


async def test_made_up_output_ends_by_itself_unless_eos_is_ignored() -> None:
    async with running(output_tokens=5) as (engine, recorder):
        engine.submit(request("a"))
        engine.submit(request("b", stopping=Stopping(max_tokens=20, ignore_eos=True)))
        a, b = await recorder.end_of("a", "b")
        assert (a.reason, a.usage.output_tokens) == ("stop", 5)
        assert (b.reason, b.usage.output_tokens) == ("length", 20)


async def test_a_second_turn_finds_every_full_block_of_the_first() -> None:
    async with running() as (engine, recorder):
        engine.submit(request("a"))
        await recorder.end_of("a")
        history = list(range(40)) + recorder.tokens("a")
        engine.submit(request("b", [*history, 7]))
        await recorder.end_of("b")
        # The last token of an output is never fed back, so its KV entry is missing: 59 of 60 tokens are there.
        assert recorder.cached("b") == 59 // 16 * 16
        assert recorder.ended["b"].usage.cached_tokens == 48


async def test_a_repeated_prompt_leaves_at_least_one_token_to_compute() -> None:
    async with running() as (engine, recorder):
        engine.submit(request("a", list(range(32))))
        await recorder.end_of("a")
        engine.submit(request("b", list(range(32))))
        await recorder.end_of("b")
        assert recorder.cached("b") == 16


async def test_another_cache_domain_shares_nothing() -> None:
    async with running() as (engine, recorder):
        engine.submit(request("a"))
        await recorder.end_of("a")
        engine.submit(request("b", domain_key=b"e" * 32))
        await recorder.end_of("b")
        assert recorder.cached("b") == 0


async def test_exported_blocks_are_checkable_and_importable_elsewhere() -> None:
    keys = chain_keys(DOMAIN, pack_tokens(range(40)), 16)
    tokens = [pack_tokens(range(16 * i, 16 * i + 16)) for i in range(2)]
    async with running() as (source, seen_source), running() as (target, seen_target):
        source.submit(request("a"))
        await seen_source.end_of("a")
        size = source.info.block_bytes
        views = [memoryview(bytearray(size)) for _ in range(3)]
        assert await source.export_blocks([*keys, b"n" * 16], views) == [True, True, False]
        assert bytes(views[1]) == block_data(keys[1], size)
        assert await target.import_blocks(b"", keys, tokens, views[:2]) == 2
        assert seen_target.steps[-1].blocks == (BlocksStored(b"", tuple(keys), tuple(tokens)),)
        assert target.cached_blocks(keys) == 2
        target.submit(request("b", onboarded_tokens=32))
        (ended,) = await seen_target.end_of("b")
        assert (ended.usage.cached_tokens, ended.usage.onboarded_tokens) == (32, 32)


async def test_wrong_data_is_not_imported() -> None:
    keys = chain_keys(DOMAIN, pack_tokens(range(16)), 16)
    async with running() as (engine, _):
        with pytest.raises(EngineError):
            await engine.import_blocks(b"", keys, [b""], [memoryview(bytes(engine.info.block_bytes))])
        assert engine.cached_blocks(keys) == 0


async def test_an_engine_without_block_bytes_does_not_export() -> None:
    async with running(block_bytes=0) as (engine, _):
        with pytest.raises(EngineError) as caught:
            await engine.export_blocks([], [])
        assert caught.value.reply.code is ErrorCode.UNSUPPORTED


async def test_cancelling_ends_once_and_frees_the_blocks() -> None:
    async with running(timing=TimingModel(speedup=1.0)) as (engine, recorder):
        engine.submit(request(stopping=Stopping(max_tokens=10_000, ignore_eos=True)))
        await recorder.until(lambda: bool(recorder.tokens("r")))
        engine.cancel("r")
        engine.cancel("r")
        engine.cancel("unknown")
        (ended,) = await recorder.end_of("r")
        assert (ended.reason, ended.usage.output_tokens) == ("cancelled", len(recorder.tokens("r")))
        assert engine.load().used_blocks == 0


async def test_stopping_ends_all_requests_as_cancelled_and_refuses_new_ones() -> None:
    async with running(timing=TimingModel(speedup=0.001), max_num_seqs=1) as (engine, recorder):
        engine.submit(request("a"))
        engine.submit(request("b"))
        await engine.stop()
        await engine.stop()
        assert {ended.reason for ended in recorder.ended.values()} == {"cancelled"}
        assert set(recorder.ended) == {"a", "b"}
        with pytest.raises(EngineError):
            engine.submit(request("c"))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tokens": []}, ErrorCode.INVALID_REQUEST),
        ({"tokens": [1] * 1024}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"mock": MockOutput(output="x", finish="never")}, ErrorCode.INVALID_REQUEST),
        ({"mock": MockOutput(output="\ud800")}, ErrorCode.INVALID_REQUEST),
        ({"sampling": Sampling(logprobs=1000)}, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_what_cannot_run_is_refused_before_anything_is_emitted(fields: dict[str, Any], code: ErrorCode) -> None:
    async with running() as (engine, recorder):
        with pytest.raises(EngineError) as caught:
            engine.submit(request(**fields))
        assert caught.value.reply.code is code
        assert recorder.steps == []


async def test_the_waiting_queue_is_bounded() -> None:
    async with running(max_waiting=2, timing=TimingModel(speedup=0.001)) as (engine, _):
        engine.submit(request("a"))
        engine.submit(request("b"))
        with pytest.raises(EngineError) as caught:
            engine.submit(request("c"))
        assert (caught.value.reply.code, caught.value.reply.retryable) == (ErrorCode.OVERLOADED, True)


async def test_higher_priority_runs_first() -> None:
    async with running(max_num_seqs=1) as (engine, recorder):
        for request_id, priority in (("low", 0), ("high", 5), ("mid", 1)):
            engine.submit(request(request_id, priority=priority))
        await recorder.end_of("low", "high", "mid")
        assert list(recorder.ended) == ["high", "mid", "low"]


async def test_output_stops_where_the_context_is_full() -> None:
    async with running(context_length=48) as (engine, recorder):
        engine.submit(request(stopping=Stopping(max_tokens=500, ignore_eos=True)))
        (ended,) = await recorder.end_of("r")
        assert (ended.reason, ended.usage.output_tokens) == ("length", 8)


async def test_logprobs_come_with_every_token_when_asked_for() -> None:
    async with running() as (engine, recorder):
        engine.submit(request(sampling=Sampling(logprobs=3), mock=MockOutput(output="ab")))
        await recorder.end_of("r")
        entries = [entry for step in recorder.steps for delta in step.deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in entries] == [97, 98]
        for entry in entries:
            ids = [token for token, _ in entry.top]
            assert (len(ids), ids[0], len(set(ids))) == (3, entry.token_id, 3)
            assert sum(math.exp(logprob) for _, logprob in entry.top) <= 1.0


async def test_rates_are_measured() -> None:
    timing = TimingModel(step_base_s=0.0, prefill_tokens_per_s=1e6, speedup=1.0)
    async with running(timing=timing) as (engine, recorder):
        prior = engine.load()
        engine.submit(request())
        await recorder.end_of("r")
        assert engine.load().prefill_tokens_per_s != prior.prefill_tokens_per_s


async def test_a_preempted_request_recomputes_and_says_the_same() -> None:
    stopping = Stopping(max_tokens=60, ignore_eos=True)
    prompts = {f"r{i}": [i] * 40 for i in range(4)}
    async with running() as (roomy, undisturbed), running(total_blocks=10) as (tight, recorder):
        for request_id, tokens in prompts.items():
            roomy.submit(request(request_id, tokens, stopping=stopping))
            tight.submit(request(request_id, tokens, stopping=stopping))
        await undisturbed.end_of(*prompts)
        await recorder.end_of(*prompts)
        assert tight.scheduler.preemptions > 0
        assert roomy.scheduler.preemptions == 0
        for request_id in prompts:
            assert recorder.tokens(request_id) == undisturbed.tokens(request_id)
            assert [start for start, _ in recorder.deltas(request_id)] == list(range(60))
        tight.scheduler.check_integrity()
