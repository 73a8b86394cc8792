"""The mock behind the engine seam: the pure scheduler, driven by the real clock."""

import asyncio
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode
from kvbus_wire.request import MockOutput
from kvbus_worker.engines.base import (
    DirectiveRun,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    StepOutput,
    StepSink,
)
from kvbus_worker.engines.mock.scheduler import MockScheduler, SchedulerLimits
from kvbus_worker.engines.mock.script import FINISHES, ScriptError, ScriptFile, ScriptLine
from kvbus_worker.engines.mock.speech import Speech, one_by_one, pieces_of, played, scripted
from kvbus_worker.engines.mock.timing import TimingModel
from kvbus_worker.engines.mock.vocabulary import Vocabulary, made_up_tokens
from kvbus_worker.engines.said import Said

KV_LAYOUT = "mock-v2"
_PIECE_BYTES = 61
_MAX_SCRIPT_BYTES = 64 << 20
_MAX_LOGPROBS = 64


class MockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``output_tokens``: length of made-up output that is not asked to ignore EOS. ``block_bytes`` 0: no export."""

    block_size: int = 16
    total_blocks: int = 8192
    context_length: int = 131_072
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_waiting: int = 1024
    block_bytes: int = 512
    pin_share: float = 0.5
    output_tokens: int = 128
    script: str = ""
    eos_token_id: int | None = None
    timing: TimingModel = TimingModel()


def block_data(key: bytes, size: int) -> bytes:
    """The content of a mock block: a function of its key, so any holder's copy can be checked. Made at the speed of memory, as an
    engine's copy would be; a piece of odd length, repeated, so that bytes in the wrong place show."""
    return (blake2b(key, digest_size=_PIECE_BYTES).digest() * (size // _PIECE_BYTES + 1))[:size]


class MockEngine:
    """Implements `kvbus_worker.engines.base.Engine`."""

    def __init__(self, config: MockConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._script: ScriptFile | None = None
        context_length = min(config.context_length, config.total_blocks * config.block_size)
        limits = SchedulerLimits(
            block_size=config.block_size,
            total_blocks=config.total_blocks,
            context_length=context_length,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_waiting=config.max_waiting,
            pin_share=config.pin_share,
        )
        self.scheduler = MockScheduler(limits, config.timing)
        self._info = EngineInfo(
            name="mock",
            block_size=config.block_size,
            total_blocks=config.total_blocks,
            context_length=context_length,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            kv_layout=f"{KV_LAYOUT}-{config.block_bytes}",
            block_bytes=config.block_bytes,
            prefill_tokens_per_s=config.timing.prior_prefill_tokens_per_s(config.max_batched_tokens),
            decode_step_s=config.timing.prior_decode_step_s(),
        )
        self._sink: StepSink | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self, sink: StepSink) -> None:
        if self._config.script:
            try:
                self._script = await asyncio.to_thread(ScriptFile, Path(self._config.script), _MAX_SCRIPT_BYTES)
            except ScriptError as error:
                raise EngineError(ErrorCode.INVALID_REQUEST, str(error), param="script") from error
        self._sink = sink
        self._task = asyncio.get_running_loop().create_task(self._run(), name="mock-engine")

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.scheduler.cancel_all()
        self._end_step_now()

    def submit(self, request: EngineRequest) -> None:
        if self._sink is None or self._stopped:
            raise EngineError(ErrorCode.UNAVAILABLE, "the engine is not running", retryable=True)
        if request.mock is not None and request.mock.finish not in FINISHES:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"mock.finish is none of {', '.join(FINISHES)}", param="mock.finish"
            )
        logprobs = request.sampling.logprobs
        if logprobs is not None and not 0 <= logprobs <= _MAX_LOGPROBS:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"logprobs is not in 0..{_MAX_LOGPROBS}", param="logprobs")
        self.scheduler.check(request)
        self.scheduler.submit(request, self._speech(request), time.monotonic())
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)
        self._wake.set()

    def load(self) -> EngineLoad:
        """Raise what broke the engine, if something did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()
        return self.scheduler.load()

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        return self.scheduler.cache.leading(keys)

    async def export_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self._require_export()
        written = []
        for key, view in zip(keys, into, strict=True):
            present = key in self.scheduler.cache
            if present:
                view[: self._info.block_bytes] = block_data(key, self._info.block_bytes)
            written.append(present)
        return written

    async def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        data: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> int:
        self._require_export()
        size = self._info.block_bytes
        for key, view in zip(keys, data, strict=True):
            if view[:size] != block_data(key, size):
                raise EngineError(ErrorCode.INTERNAL, f"the data of block {key.hex()} is not the block's")
        self.scheduler.cache.now_s = time.monotonic()
        depth = self.scheduler.cache.adopt(parent, keys, tokens, said)
        self._hand_over(StepOutput(blocks=self.scheduler.cache.take_events()))
        return depth

    def directives(self, keys: Sequence[bytes]) -> list[Directive]:
        return [self.scheduler.cache.directive(key) for key in keys]

    async def touch(self, keys: Sequence[bytes], directives: Sequence[DirectiveRun]) -> int:
        self.scheduler.cache.now_s = time.monotonic()
        return self.scheduler.cache.touch(keys, Said(directives))

    async def drop_blocks(self, keys: Sequence[bytes]) -> int:
        dropped = self.scheduler.cache.drop(keys)
        self._hand_over(StepOutput(blocks=self.scheduler.cache.take_events()))
        return dropped

    def _require_export(self) -> None:
        if not self._info.block_bytes:
            raise EngineError(ErrorCode.UNSUPPORTED, "this engine does not export blocks")

    def _speech(self, request: EngineRequest) -> Speech:
        prompt = request.tokens[: len(request.tokens) - request.resumed]
        output: MockOutput | ScriptLine | None = request.mock
        if (
            output is None and not request.speculative and not request.prefill_only
        ):  # nobody hears that, so it takes no line of the script
            output = self._scripted(prompt)
        if output is not None:
            pieces, grouped = pieces_of(output)
            try:
                encoded = [self._vocabulary.encode(piece) for piece in pieces]
            except ValueError as error:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"mock.output: {error}", param="mock.output") from error
            if not grouped:
                encoded = [[token] for token in encoded[0]]
            if isinstance(output, ScriptLine):
                return scripted(encoded, output, request.stopping, self._config.eos_token_id)
            return played(encoded, output.finish, request.stopping, self._config.eos_token_id)
        length = min(request.stopping.max_tokens, self._info.context_length)
        ends_itself = self._config.output_tokens < length and not request.stopping.ignore_eos
        if ends_itself:
            length = max(self._config.output_tokens, min(request.stopping.min_tokens, length))
        tokens = made_up_tokens(prompt, self._vocabulary.words, length)
        return one_by_one(
            tokens, request.stopping, reason="stop" if ends_itself else "length", eos=self._config.eos_token_id
        )

    def _scripted(self, prompt: Sequence[int]) -> ScriptLine | None:
        if self._script is None:
            return None
        try:
            line = self._script.take(lambda: self._vocabulary.decode(prompt))
        except ScriptError as error:
            raise EngineError(ErrorCode.INVALID_REQUEST, str(error), param="script") from error
        if line is not None and line.error is not None and line.refuses:
            said = line.error
            raise EngineError(said.code, said.message, retryable=said.retryable, retry_after_s=said.retry_after_s)
        return line

    async def _run(self) -> None:
        """Steps follow each other on a time line of their own: what the event loop's timer is late by is caught up."""
        due = time.monotonic()
        while True:
            if not self.scheduler.has_work:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
            now = time.monotonic()
            step = self.scheduler.begin(now)
            due = max(due, now - step.duration_s) + step.duration_s
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            self._hand_over(self.scheduler.finish(step, time.monotonic()))

    def _end_step_now(self) -> None:
        now = time.monotonic()
        if self.scheduler.has_work:
            self._hand_over(self.scheduler.finish(self.scheduler.begin(now), now))

    def _hand_over(self, output: StepOutput) -> None:
        if self._sink is not None and (output.started or output.deltas or output.ended or output.blocks):
            self._sink(output)
