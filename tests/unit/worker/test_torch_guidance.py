"""The torch engine with guidance: what comes out, when it ends, what it costs others."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
llguidance = pytest.importorskip("llguidance")

from kvbus_tokenizers import Tokenizer  # noqa: E402
from kvbus_wire.errors import ErrorCode  # noqa: E402
from kvbus_wire.frontend import Delta, Ended  # noqa: E402
from kvbus_wire.guidance import CallSection, FreeBlock, Guidance, GuidedCall  # noqa: E402
from kvbus_wire.packing import unpack_tokens  # noqa: E402
from kvbus_wire.request import Sampling, Stopping  # noqa: E402
from kvbus_worker.engines.base import EngineError, EngineRequest, StepOutput  # noqa: E402
from kvbus_worker.engines.torch import grammars  # noqa: E402
from kvbus_worker.engines.torch.engine import TorchEngine  # noqa: E402
from kvbus_worker.engines.torch.grammars import Grammars  # noqa: E402
from kvbus_worker.engines.torch.guide import bias_of, unpacked  # noqa: E402
from kvbus_worker.engines.torch.settings import GrammarLimits, TorchSettings  # noqa: E402
from kvbus_worker.models import tiny  # noqa: E402

DOMAIN = b"d" * 32
PROMPT = list(range(20, 60))
EOS = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
JSON = Guidance(form="json_schema", text=json.dumps(SCHEMA), param="response_format")
PATTERN = Guidance(form="regex", text="(ab|cd){6}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text_of(folder: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer((folder / "tokenizer.json").read_bytes())
    return lambda tokens: tokenizer.decode(tokens, keep_special=True)


class Recorder:
    def __init__(self) -> None:
        self.ended: dict[str, Ended] = {}
        self.started: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.deltas: list[Delta] = []
        self._changed = asyncio.Event()

    def __call__(self, step: StepOutput) -> None:
        self.started += [event.request_id for event in step.started]
        self.deltas += step.deltas
        for delta in step.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(unpack_tokens(delta.tokens))
        for event in step.ended:
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, *request_ids: str) -> list[Ended]:
        await self.until(lambda: all(request_id in self.ended for request_id in request_ids))
        return [self.ended[request_id] for request_id in request_ids]


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[tuple[TorchEngine, Recorder]]:
    base: dict[str, Any] = {"total_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 64}
    engine = TorchEngine(TorchSettings(model_dir=str(folder), **(base | settings)))
    recorder = Recorder()
    await engine.start(recorder)
    try:
        yield engine, recorder
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def only_engine(folder: Path) -> AsyncIterator[TorchEngine]:
    async with running(folder) as (engine, _):
        yield engine


Shared = tuple[TorchEngine, Recorder]


@pytest.fixture
def shared(only_engine: TorchEngine) -> Shared:
    """The engine of all tests that leave it as it is."""
    recorder = Recorder()
    only_engine._sink = recorder
    return only_engine, recorder


def request(
    request_id: str, guidance: Guidance | None = JSON, tokens: list[int] = PROMPT, **fields: Any
) -> EngineRequest:
    stopping: dict[str, Any] = {"max_tokens": 200} | fields.pop("stopping", {})
    defaults: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "domain_key": DOMAIN}
    return EngineRequest(
        request_id=request_id, tokens=tokens, guidance=guidance, stopping=Stopping(**stopping), **(defaults | fields)
    )


def towards(*tokens: int, **sampling: Any) -> Sampling:
    """A model that wants nothing as much as these tokens."""
    return Sampling(**({"temperature": 0.0} | sampling), logit_bias=dict.fromkeys(tokens, 1000.0))


@pytest.mark.asyncio(loop_scope="module")
async def test_output_follows_the_schema_and_ends_with_it(shared: Shared, text_of: Callable[[list[int]], str]) -> None:
    engine, recorder = shared
    assert engine.info.guidance
    engine.submit(request("greedy", sampling=towards(35 + 7 + 90)))
    engine.submit(request("drawn", sampling=Sampling(temperature=1.0, seed=3)))
    engine.submit(request("nucleus", sampling=Sampling(temperature=1.0, seed=3, top_p=0.9, top_k=20, min_p=0.01)))
    ends = await recorder.end_of("greedy", "drawn", "nucleus")
    for end in ends:
        assert (end.reason, end.error) == ("stop", None)
        value = json.loads(text_of(recorder.tokens[end.request_id]))
        assert value["kind"] in ("cat", "dog")
        assert value["ok"] in (True, False)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_same_grammar_and_prompt_give_the_same_output(shared: Shared) -> None:
    engine, recorder = shared
    for name in ("a", "b"):
        engine.submit(request(name))
        engine.submit(request(f"drawn {name}", sampling=Sampling(temperature=1.0, seed=5)))
    await recorder.end_of("a", "b", "drawn a", "drawn b")
    assert recorder.tokens["a"] == recorder.tokens["b"]
    assert recorder.tokens["drawn a"] == recorder.tokens["drawn b"]


def test_masks_are_the_same_on_every_device() -> None:
    words = np.random.Generator(np.random.PCG64(3)).integers(0, 2**32, (3, 5), dtype=np.uint32)
    allowed = unpacked(words, torch.device("cpu"))
    assert allowed.shape == (3, 160)
    for row, mask in zip(allowed, words, strict=True):
        assert [bool(int(mask[i // 32]) >> (i % 32) & 1) for i in range(160)] == row.tolist()
        assert torch.equal(bias_of(mask) == 0.0, row)
        assert torch.equal(bias_of(mask) == float("-inf"), ~row)


@pytest.mark.asyncio(loop_scope="module")
async def test_others_are_not_touched(shared: Shared) -> None:
    engine, recorder = shared
    engine.submit(request("alone", None, stopping={"max_tokens": 16}))
    await recorder.end_of("alone")
    engine.submit(request("beside", None, stopping={"max_tokens": 16}))
    engine.submit(request("guided"))
    await recorder.end_of("beside", "guided")
    assert recorder.tokens["beside"] == recorder.tokens["alone"]


@pytest.mark.asyncio(loop_scope="module")
async def test_log_probabilities_stay_the_models_own(shared: Shared) -> None:
    engine, recorder = shared
    engine.submit(request("a", Guidance(form="regex", text="z{4}"), sampling=Sampling(temperature=0.0, logprobs=1)))
    await recorder.end_of("a")
    first = recorder.deltas[0].logprobs[0]
    (best, best_logprob) = first.top[0]
    assert best != first.token_id
    assert best_logprob > first.logprob > float("-inf")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_end_of_sequence_comes_only_where_the_grammar_may_end(
    shared: Shared, text_of: Callable[[list[int]], str]
) -> None:
    may_end = Guidance(form="regex", text="abc(def)*")
    engine, recorder = shared
    engine.submit(request("eos", may_end, sampling=towards(EOS)))
    engine.submit(request("stop id", may_end, sampling=towards(1), stopping={"stop_token_ids": (1,)}))
    engine.submit(request("min", may_end, sampling=towards(EOS), stopping={"min_tokens": 5}))
    engine.submit(request("ignored", may_end, sampling=towards(EOS), stopping={"ignore_eos": True, "max_tokens": 9}))
    ends = await recorder.end_of("eos", "stop id", "min", "ignored")
    texts = [text_of(recorder.tokens[end.request_id]) for end in ends]
    assert texts == ["abc", "abc", "abcdef", "abcdefdef"]
    assert [(end.reason, end.stop_token_id) for end in ends] == [
        ("stop", EOS),
        ("stop", 1),
        ("stop", EOS),
        ("length", None),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_that_is_over_ends_the_output_whatever_else_was_asked(shared: Shared) -> None:
    short = Guidance(form="regex", text="ab")
    engine, recorder = shared
    engine.submit(request("min", short, stopping={"min_tokens": 50}))
    engine.submit(request("ignored", short, stopping={"ignore_eos": True}))
    ends = await recorder.end_of("min", "ignored")
    assert [(end.reason, end.usage.output_tokens) for end in ends] == [("stop", 2)] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_tokens_within_the_grammar_still_stop(
    shared: Shared, folder: Path, text_of: Callable[[list[int]], str]
) -> None:
    colon = Tokenizer((folder / "tokenizer.json").read_bytes()).encode(":")[0]
    engine, recorder = shared
    engine.submit(request("a", stopping={"stop_token_ids": (colon,)}))
    (end,) = await recorder.end_of("a")
    assert (end.reason, end.stop_token_id) == ("stop", colon)
    assert text_of(recorder.tokens["a"]).strip("{ \n\t\r") == '"kind"'


@pytest.mark.asyncio(loop_scope="module")
async def test_output_that_is_cut_is_a_beginning(shared: Shared, text_of: Callable[[list[int]], str]) -> None:
    engine, recorder = shared
    engine.submit(request("a", PATTERN, stopping={"max_tokens": 5}))
    (end,) = await recorder.end_of("a")
    assert end.reason == "length"
    assert len(text_of(recorder.tokens["a"])) == 5


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=9)])
@pytest.mark.parametrize("guidance", [JSON, PATTERN], ids=["json", "pattern"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_migrated_request_goes_on_where_it_was(shared: Shared, guidance: Guidance, sampling: Sampling) -> None:
    engine, recorder = shared
    engine.submit(request("whole", guidance, sampling=sampling))
    (whole_end,) = await recorder.end_of("whole")
    whole = recorder.tokens["whole"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        name = f"after {cut}"
        engine.submit(request(name, guidance, PROMPT + whole[:cut], resumed=cut, sampling=sampling))
        (end,) = await recorder.end_of(name)
        assert whole[:cut] + recorder.tokens[name] == whole
        assert (end.reason, end.usage.output_tokens) == ("stop", whole_end.usage.output_tokens)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_migrates_after_its_last_token_ends_at_once(shared: Shared) -> None:
    engine, recorder = shared
    engine.submit(request("whole"))
    await recorder.end_of("whole")
    whole = recorder.tokens["whole"]
    engine.submit(request("late", tokens=PROMPT + whole, resumed=len(whole)))
    (end,) = await recorder.end_of("late")
    assert end.reason == "stop"
    assert "late" not in recorder.tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_output_of_elsewhere_that_breaks_the_grammar_is_refused(shared: Shared) -> None:
    engine, recorder = shared
    engine.submit(request("broken", tokens=[*PROMPT, 100, 101], resumed=2))
    (end,) = await recorder.end_of("broken")
    assert end.error is not None
    assert (end.error.code, end.error.param) == (ErrorCode.INVALID_REQUEST, "resumed")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_preempted_request_keeps_its_place_in_the_grammar(folder: Path) -> None:
    long = Guidance(form="regex", text="(ab|cd){60}")
    draws = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    async with running(folder, total_blocks=16) as (engine, recorder):
        for i, sampling in enumerate(draws):
            engine.submit(request(f"alone {i}", long, sampling=sampling))
            await recorder.end_of(f"alone {i}")
        assert await engine._ask(lambda compute: compute.scheduler.preemptions) == 0
        for i, sampling in enumerate(draws):
            engine.submit(request(f"crowded {i}", long, sampling=sampling))
        await recorder.end_of("crowded 0", "crowded 1", "crowded 2")
        assert await engine._ask(lambda compute: compute.scheduler.preemptions) > 0
    for i in range(3):
        assert recorder.tokens[f"crowded {i}"] == recorder.tokens[f"alone {i}"]


@pytest.mark.asyncio(loop_scope="module")
async def test_thoughts_are_free_and_calls_are_not(shared: Shared, text_of: Callable[[list[int]], str]) -> None:
    call = GuidedCall(
        begin='<tool_call>\n{"name": "f", "arguments": ', end="}\n</tool_call>", schema=json.dumps(SCHEMA)
    )
    guidance = Guidance(
        form="none",
        section=CallSection(calls=(call,), trigger="<tool_call>", separator="\n"),
        blocks=(FreeBlock(begin="<think>", end="</think>"),),
        open_block=True,
    )
    think_end = tiny.SPECIAL.index("</think>")
    engine, recorder = shared
    engine.submit(request("a", guidance, sampling=towards(think_end, EOS)))
    (end,) = await recorder.end_of("a")
    text = text_of(recorder.tokens["a"])
    assert end.reason == "stop"
    thoughts, _, rest = text.partition("<tool_call>")
    assert thoughts.startswith("</think>")
    body = rest.removesuffix("</tool_call>")
    assert json.loads(body)["arguments"]["kind"] in ("cat", "dog")


@pytest.mark.parametrize(
    ("guidance", "param", "problem"),
    [
        (Guidance(form="json_schema", text='{"type":"objct"}', param="response_format"), "response_format", "objct"),
        (Guidance(form="json_schema", text='{"not":{}}', strict=True, param="text.format"), "text.format", "not"),
        (Guidance(form="regex", text="(?=a)b", param="tools[0].format"), "tools[0].format", "look-around"),
        (Guidance(form="lark", text="start: nothing", param="tools[0]"), "tools[0]", "nothing"),
        (Guidance(form="lark", text="start: <|im_end|>", param="tools[0]"), "tools[0]", "special token"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_followed_is_refused_before_the_start(
    shared: Shared, guidance: Guidance, param: str, problem: str
) -> None:
    engine, recorder = shared
    for name in ("first", "from the cache"):
        engine.submit(request(name, guidance))
        (end,) = await recorder.end_of(name)
        assert end.reason == "error"
        assert end.error is not None
        assert (end.error.code, end.error.param) == (ErrorCode.INVALID_REQUEST, param)
        assert not end.error.retryable
        assert problem in end.error.message
    assert not recorder.started
    assert (engine.load().waiting, engine.load().waiting_tokens) == (0, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_waits_while_its_grammar_is_compiled_and_others_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    plain = Grammars.guide

    async def slow(self: Grammars, guidance: Guidance, output: list[int]) -> Any:
        await gate.wait()
        return await plain(self, guidance, output)

    monkeypatch.setattr(Grammars, "guide", slow)
    async with running(folder) as (engine, recorder):
        engine.submit(request("guided"))
        engine.submit(request("plain", None, stopping={"max_tokens": 4}))
        await recorder.end_of("plain")
        assert engine.load().waiting == 1
        assert engine.load().waiting_tokens == len(PROMPT)
        gate.set()
        await recorder.end_of("guided")


@pytest.mark.asyncio(loop_scope="module")
async def test_cancelling_while_a_grammar_is_compiled_ends_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(Grammars, "guide", never)
    async with running(folder) as (engine, recorder):
        engine.submit(request("at once"))
        engine.cancel("at once")
        engine.submit(request("later"))
        await asyncio.sleep(0)
        engine.cancel("later")
        ends = await recorder.end_of("at once", "later")
        assert [end.reason for end in ends] == ["cancelled"] * 2
        assert engine.load().waiting == 0
        engine.submit(request("at the stop"))
    assert recorder.ended["at the stop"].reason == "cancelled"


@pytest.mark.asyncio(loop_scope="module")
async def test_guidance_is_limited_in_size(folder: Path) -> None:
    text = json.dumps(SCHEMA)
    async with running(folder, grammars=GrammarLimits(source_bytes=len(text))) as (engine, recorder):
        engine.submit(request("fits"))
        await recorder.end_of("fits")
        larger = Guidance(form="json_schema", text=text + " ", param="response_format")
        with pytest.raises(EngineError) as caught:
            engine.submit(request("larger", larger))
    assert caught.value.reply.code is ErrorCode.INVALID_REQUEST
    assert caught.value.reply.param == "response_format"


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_that_wait_for_grammars_are_limited(folder: Path) -> None:
    async with running(folder, grammars=GrammarLimits(waiting=1)) as (engine, recorder):
        engine.submit(request("a"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError) as caught:
            engine.submit(request("b"))
        assert caught.value.reply.code is ErrorCode.OVERLOADED
        assert caught.value.reply.retryable
        await recorder.end_of("a")
        engine.submit(request("b"))
        await recorder.end_of("b")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_without_a_tokenizer_has_no_guidance(folder: Path, tmp_path: Path) -> None:
    bare = tiny.write(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    async with running(bare) as (engine, recorder):
        assert not engine.info.guidance
        engine.submit(request("a"))
        (end,) = await recorder.end_of("a")
        assert end.error is not None
        assert end.error.code is ErrorCode.UNSUPPORTED


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_that_becomes_too_complex_ends_its_request_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(max_items_in_row=100)
    monkeypatch.setattr(grammars, "parser_limits", lambda: limits)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    schema = {"type": "array", "prefixItems": [{"const": "abc"}, wide], "minItems": 2}
    async with running(folder) as (engine, recorder):
        engine.submit(request("plain", None, stopping={"max_tokens": 60, "ignore_eos": True}))
        engine.submit(request("wide", Guidance(form="json_schema", text=json.dumps(schema))))
        plain, wide_end = await recorder.end_of("plain", "wide")
    assert plain.reason == "length"
    assert recorder.tokens["wide"], "it came to the complex part only after some tokens"
    assert wide_end.error is not None
    assert wide_end.error.code is ErrorCode.INVALID_REQUEST
    assert not wide_end.error.retryable
    assert "row" in wide_end.error.message
