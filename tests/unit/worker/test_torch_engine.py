"""The torch engine as a whole: stopping, failures, its thread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvbus_blocks.keys import ROOT, chain_keys  # noqa: E402
from kvbus_wire.errors import ErrorCode  # noqa: E402
from kvbus_wire.frontend import Delta, Ended, Started  # noqa: E402
from kvbus_wire.packing import pack_tokens, unpack_tokens  # noqa: E402
from kvbus_wire.request import MockOutput, Sampling, Stopping  # noqa: E402
from kvbus_worker.engines.base import BlocksCleared, Engine, EngineError, EngineRequest, StepOutput  # noqa: E402
from kvbus_worker.engines.torch.compute import Compute  # noqa: E402
from kvbus_worker.engines.torch.engine import TorchEngine  # noqa: E402
from kvbus_worker.engines.torch.model import StepInput, Transformer  # noqa: E402
from kvbus_worker.engines.torch.scheduler import Scheduler  # noqa: E402
from kvbus_worker.engines.torch.settings import TorchSettings  # noqa: E402
from kvbus_worker.models import tiny  # noqa: E402

DOMAIN = b"d" * 32
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


class Recorder:
    def __init__(self) -> None:
        self.started: dict[str, Started] = {}
        self.deltas: list[Delta] = []
        self.ended: dict[str, Ended] = {}
        self.steps: list[StepOutput] = []
        self._changed = asyncio.Event()

    def __call__(self, step: StepOutput) -> None:
        self.steps.append(step)
        self.started |= {event.request_id: event for event in step.started}
        self.deltas += step.deltas
        for event in step.ended:
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event
        self._changed.set()

    def output(self, request_id: str) -> list[int]:
        return [
            token for delta in self.deltas if delta.request_id == request_id for token in unpack_tokens(delta.tokens)
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, *request_ids: str) -> list[Ended]:
        await self.until(lambda: all(request_id in self.ended for request_id in request_ids))
        return [self.ended[request_id] for request_id in request_ids]


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[tuple[Engine, Recorder]]:
    base: dict[str, Any] = {"total_blocks": 64, "max_num_seqs": 4, "max_batched_tokens": 32}
    engine: Engine = TorchEngine(TorchSettings(model_dir=str(folder), **(base | settings)))
    recorder = Recorder()
    await engine.start(recorder)
    try:
        yield engine, recorder
    finally:
        await engine.stop()


def request(request_id: str, tokens: list[int] = PROMPT, **fields: Any) -> EngineRequest:
    stopping: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True} | fields.pop("stopping", {})
    defaults: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "domain_key": DOMAIN}
    return EngineRequest(request_id=request_id, tokens=tokens, stopping=Stopping(**stopping), **(defaults | fields))


async def test_end_of_sequence_tokens_end_an_answer_unless_ignored(folder: Path) -> None:
    def towards(token: int) -> dict[str, Any]:
        return {"sampling": Sampling(temperature=0.0, logit_bias={token: 1000.0})}

    async with running(folder) as (engine, recorder):
        engine.submit(request("eos", stopping={"ignore_eos": False}, **towards(2)))
        engine.submit(request("second eos", stopping={"ignore_eos": False}, **towards(0)))
        engine.submit(request("ignored", **towards(2)))
        engine.submit(request("later", stopping={"ignore_eos": False, "min_tokens": 5}, **towards(2)))
        eos, second, ignored, later = await recorder.end_of("eos", "second eos", "ignored", "later")
    assert (eos.reason, eos.stop_token_id, eos.usage.output_tokens) == ("stop", 2, 0)
    assert (second.reason, second.stop_token_id) == ("stop", 0)
    assert (ignored.reason, ignored.stop_token_id) == ("length", None)
    assert recorder.output("ignored") == [2] * 8
    assert (later.reason, later.stop_token_id, later.usage.output_tokens) == ("stop", 2, 5)
    assert 2 not in recorder.output("later")


async def test_logprobs_come_with_their_tokens(folder: Path) -> None:
    async with running(folder) as (engine, recorder):
        engine.submit(request("a", sampling=Sampling(temperature=0.0, logprobs=3)))
        await recorder.end_of("a")
    for delta in recorder.deltas:
        (entry,) = delta.logprobs
        assert [entry.token_id] == unpack_tokens(delta.tokens)
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len(entry.top) == 3


async def test_requests_without_a_seed_differ(folder: Path) -> None:
    async with running(folder) as (engine, recorder):
        for i in range(4):
            engine.submit(request(f"{i}", sampling=Sampling(temperature=3.0), stopping={"max_tokens": 20}))
        await recorder.end_of(*"0123")
    assert len({tuple(recorder.output(f"{i}")) for i in range(4)}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(top_k=-2)}, "top_k"),
        ({"sampling": Sampling(min_p=2.0)}, "min_p"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": Sampling(logprobs=21)}, "logprobs"),
        ({"sampling": Sampling(logit_bias={100_000: 1.0})}, "logit_bias"),
        ({"tokens": [1, 100_000]}, "tokens"),
        ({"tokens": [1, 2], "resumed": 2}, "resumed"),
        ({"stopping": {"max_tokens": 0}}, "max_tokens"),
        ({"stopping": {"stop_token_ids": (99_999,)}}, "stop_token_ids"),
        ({"mock": MockOutput(output="hi")}, "mock"),
    ],
    ids=str,
)
async def test_requests_out_of_range_are_refused_with_the_parameter(
    folder: Path, fields: dict[str, Any], param: str
) -> None:
    async with running(folder) as (engine, recorder):
        with pytest.raises(EngineError) as refused:
            engine.submit(request("a", **fields))
        assert refused.value.reply.param == param
        engine.submit(request("a"))
        await recorder.end_of("a")
    assert len(recorder.ended) == 1


async def test_a_prefix_is_computed_once_by_requests_that_arrive_together(folder: Path) -> None:
    """The prefix takes three steps, during which the others wait for it."""
    async with running(folder) as (engine, recorder):
        for i in range(4):
            engine.submit(request(f"{i}", [*range(20, 100), 200 + i]))
        await recorder.end_of(*"0123")
    assert sorted(event.cached_tokens for event in recorder.started.values()) == [0, 80, 80, 80]


async def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Transformer.forward
    calls = 0

    def failing(self: Transformer, step: StepInput) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of memory")
        return forward(self, step)

    async with running(folder, max_num_seqs=2) as (engine, recorder):
        monkeypatch.setattr(Transformer, "forward", failing)
        for i in range(3):
            engine.submit(request(f"{i}", list(range(20 + i, 40 + i))))
        first, second, third = await recorder.end_of(*"012")
        assert engine.load().used_blocks == 0
        engine.submit(request("after"))
        (after,) = await recorder.end_of("after")
    for ended in (first, second):
        assert ended.reason == "error"
        assert ended.error is not None
        assert (ended.error.code, ended.error.retryable) == (ErrorCode.INTERNAL, True)
        assert "out of memory" in ended.error.message
    assert (third.reason, after.reason) == ("length", "length")


async def test_output_that_is_not_finite_ends_its_request_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Transformer.forward

    def poisoned(self: Transformer, step: StepInput) -> Any:
        logits = forward(self, step).clone()
        for row, token in enumerate(step.sampled):
            if step.tokens[token] == 99:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(Transformer, "forward", poisoned)
    async with running(folder) as (engine, recorder):
        engine.submit(request("bad", [20, 21, 99]))
        engine.submit(request("good", [20, 21, 22], sampling=Sampling(temperature=0.0, logit_bias={99: -1000.0})))
        bad, good = await recorder.end_of("bad", "good")
    assert bad.error is not None
    assert bad.error.code is ErrorCode.INTERNAL
    assert good.reason == "length"


async def test_a_broken_scheduler_ends_everything_drops_the_cache_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as (engine, recorder):
        engine.submit(request("before"))
        await recorder.end_of("before")
        plan, computed = Scheduler.plan, Scheduler.computed
        for broken, original in (("plan", plan), ("computed", computed)):

            def fail(*_: Any) -> None:
                raise KeyError("lost")

            monkeypatch.setattr(Scheduler, broken, fail)
            for i in range(3):
                engine.submit(request(f"{broken} {i}"))
            ended = await recorder.end_of(*(f"{broken} {i}" for i in range(3)))
            assert {event.reason for event in ended} == {"error"}
            monkeypatch.setattr(Scheduler, broken, original)
            assert engine.cached_blocks(chain_keys(DOMAIN, pack_tokens(PROMPT), 16)) == 0
            engine.submit(request(f"after {broken}"))
            (after,) = await recorder.end_of(f"after {broken}")
            assert after.reason == "length"
    assert any(isinstance(event, BlocksCleared) for step in recorder.steps for event in step.blocks)


async def test_a_model_that_cannot_be_loaded_fails_the_start_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00{}xxx")
    engine = TorchEngine(TorchSettings(model_dir=str(tmp_path), total_blocks=4))
    with pytest.raises(EngineError) as failed:
        await engine.start(Recorder())
    assert failed.value.reply.code is ErrorCode.UNAVAILABLE
    with pytest.raises(EngineError):
        engine.submit(request("a"))
    await engine.stop()
    await engine.stop()


async def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tiny.write(tmp_path, num_hidden_layers=1)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(EngineError, match=r"model\.layers\.1\.input_layernorm"):
        await TorchEngine(TorchSettings(model_dir=str(tmp_path), total_blocks=4)).start(Recorder())
    tiny.write(tmp_path)
    config.write_text(config.read_text().replace('"intermediate_size": 128', '"intermediate_size": 64'))
    with pytest.raises(EngineError, match="gate_proj"):
        await TorchEngine(TorchSettings(model_dir=str(tmp_path), total_blocks=4)).start(Recorder())


async def test_an_engine_that_never_started_stops_and_refuses(folder: Path) -> None:
    engine = TorchEngine(TorchSettings(model_dir=str(folder), total_blocks=4))
    with pytest.raises(EngineError):
        engine.submit(request("a"))
    with pytest.raises(EngineError):
        await engine.export_blocks([], [])
    assert engine.cached_blocks([b"k" * 16]) == 0
    assert engine.load().total_blocks == 4
    await engine.stop()


async def test_block_lists_that_do_not_fit_are_refused(folder: Path) -> None:
    async with running(folder) as (engine, _):
        room = memoryview(bytearray(engine.info.block_bytes))
        with pytest.raises(EngineError):
            await engine.export_blocks([b"k" * 16], [])
        with pytest.raises(EngineError):
            await engine.export_blocks([b"k" * 16], [room[:-1]])
        with pytest.raises(EngineError):
            await engine.import_blocks(ROOT, [b"k" * 16], [b"t" * 63], [room])
        with pytest.raises(EngineError):
            await engine.import_blocks(ROOT, [b"k"], [b"t" * 64], [room])


async def test_a_caller_cancelled_in_an_export_leaves_only_when_its_memory_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Compute.export_blocks
    finished = False

    def watched(self: Compute, keys: Any, into: Any) -> list[bool]:
        nonlocal finished
        copied = export(self, keys, into)
        finished = True
        return copied

    monkeypatch.setattr(Compute, "export_blocks", watched)
    async with running(folder) as (engine, recorder):
        engine.submit(request("a", stopping={"max_tokens": 200}))
        await recorder.until(lambda: "a" in recorder.started)
        room = memoryview(bytearray(engine.info.block_bytes))
        task = asyncio.ensure_future(engine.export_blocks([b"k" * 16], [room]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finished


async def test_computing_waits_for_a_loop_that_does_not_take_its_steps(folder: Path) -> None:
    async with running(folder, max_steps_ahead=3) as (engine, recorder):
        engine.submit(request("a", stopping={"max_tokens": 100}))
        await recorder.until(lambda: "a" in recorder.started)
        seen = len(recorder.deltas)
        torch.randn(700, 700).matmul(torch.randn(700, 700))  # the loop is busy; steps take less time than this
        await asyncio.sleep(0)
        assert len(recorder.deltas) - seen <= 4
        (ended,) = await recorder.end_of("a")
    assert ended.reason == "length"
    assert len(recorder.output("a")) == 100


async def test_rates_are_measured(folder: Path) -> None:
    async with running(folder) as (engine, recorder):
        assert engine.info.prefill_tokens_per_s > 0
        assert engine.info.decode_step_s > 0
        engine.submit(request("a"))
        await recorder.end_of("a")
        load = engine.load()
    assert load.decode_step_s != engine.info.decode_step_s
    ended = recorder.ended["a"]
    assert ended.usage.prefill_s > 0
    assert ended.usage.queue_s >= 0
