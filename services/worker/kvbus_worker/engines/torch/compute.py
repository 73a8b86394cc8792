"""The engine without its thread: requests in, one step after the other, outcomes out. Synchronous, for one thread.

A failing step ends the requests it served and nothing else: blocks get their keys only after the step that filled them.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, TokenLogprob
from kvbus_wire.packing import pack_tokens
from kvbus_worker.engines.base import DirectiveRun, EngineError, EngineInfo, EngineLoad, EngineRequest, StepOutput
from kvbus_worker.engines.said import Said
from kvbus_worker.engines.step_rates import StepRates
from kvbus_worker.engines.torch import weights
from kvbus_worker.engines.torch.attention import Segment
from kvbus_worker.engines.torch.block_pool import BlockPool
from kvbus_worker.engines.torch.config import ModelConfig
from kvbus_worker.engines.torch.guide import Guide
from kvbus_worker.engines.torch.kv_cache import KvCache
from kvbus_worker.engines.torch.model import StepInput, Transformer
from kvbus_worker.engines.torch.sampler import Drawn, Row, SamplerState, sample
from kvbus_worker.engines.torch.scheduler import Chunk, Limits, Scheduler
from kvbus_worker.engines.torch.sequence import StopRule, TokenSequence
from kvbus_worker.engines.torch.settings import TorchSettings
from kvbus_worker.engines.torch.sizing import count_blocks, describe

_log = structlog.get_logger(__name__)

_TRIAL_TOKENS = 64
_TRIALS = 3


class Compute:
    """Loads the model on construction, which takes its time. Raise EngineError."""

    def __init__(self, settings: TorchSettings, config: ModelConfig) -> None:
        torch.set_num_threads(settings.threads)  # counts for the calling thread, which is the one that computes
        try:
            device = torch.device(settings.device)
            dtype = getattr(torch, settings.dtype)
            loaded = weights.load(Path(settings.model_dir), config, device, dtype)
            free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
            info = describe(settings, config, count_blocks(settings, config, free_bytes))
            self.cache = KvCache(config, info.total_blocks, info.block_size, device, dtype)
        except (RuntimeError, MemoryError) as error:  # torch's own: no such device, out of memory
            raise EngineError(ErrorCode.UNAVAILABLE, f"the model cannot be loaded: {error}") from error
        self.model = Transformer(config, loaded, self.cache, info.context_length)
        self.pool = BlockPool(info.total_blocks, settings.pin_share)
        limits = Limits(
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_batched_tokens=info.max_batched_tokens,
        )
        self.scheduler = Scheduler(limits, self.pool)
        self.rates = StepRates(*self._trial(info))
        self.info = describe(
            settings, config, info.total_blocks, self.rates.prefill_tokens_per_s, self.rates.decode_step_s
        )
        self._rule = StopRule(config.eos_token_ids, info.context_length)
        self._samplers: dict[str, SamplerState] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            waiting_tokens=self.scheduler.waiting_tokens,
            used_blocks=self.pool.used,
            total_blocks=self.pool.total,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_s=self.rates.decode_step_s,
        )

    def submit(self, request: EngineRequest, arrived_s: float, guide: Guide | None = None) -> StepOutput:
        """Take a request that was checked, with a guide that knows what it brought along. It ends at once when that is all it may
        have."""
        self._arrivals += 1
        sequence = TokenSequence(request, self._rule, self.info.block_size, self._arrivals, arrived_s)
        if sequence.is_full():
            return StepOutput(ended=(sequence.ended("length", time.monotonic()),))
        if guide is not None and guide.is_over:
            return StepOutput(ended=(sequence.ended("stop", time.monotonic()),))
        seed = request.sampling.seed
        prompt, output = request.tokens[: sequence.prompt_tokens], request.tokens[sequence.prompt_tokens :]
        self._samplers[request.request_id] = SamplerState(
            request.sampling, secrets.randbits(63) if seed is None else seed, prompt, output, sequence.stop_ids, guide
        )
        self.scheduler.add(sequence)
        return StepOutput()

    def cancel(self, request_id: str) -> StepOutput:
        sequence = self.scheduler.get(request_id)
        return StepOutput(ended=(self._end(sequence, "cancelled"),) if sequence else ())

    def end_all(self, reason: str, error: ErrorReply | None = None) -> StepOutput:
        """End every request and forget all blocks: after this nothing of the past is relied on."""
        now_s = time.monotonic()
        ended = tuple(sequence.ended(reason, now_s, error=error) for sequence in self.scheduler.sequences())
        self.scheduler.clear()
        self._samplers.clear()
        self.pool.clear()
        return StepOutput(ended=ended, blocks=self.pool.take_events())

    def step(self) -> StepOutput:
        """Compute one step. Never raises for what goes wrong in it: the affected requests end with an error."""
        started_s = time.monotonic()
        try:
            chunks = self.scheduler.plan(started_s)
            if not chunks:
                raise RuntimeError("there is work, but the scheduler plans none")
        except Exception as error:
            _log.exception("scheduling failed; all requests end and the cache is dropped")
            return self.end_all("error", internal_error(error))
        try:
            drawn = self._forward(chunks)
        except Exception as error:
            _log.exception("a step failed; its requests end", requests=[chunk.sequence.id for chunk in chunks])
            reply = internal_error(error)
            ended = tuple(self._end(chunk.sequence, "error", error=reply) for chunk in chunks)
            return StepOutput(ended=ended, blocks=self.pool.take_events())
        now_s = time.monotonic()
        prefilled = sum(chunk.count for chunk in chunks if chunk.count > 1)
        self.rates.observe(prefilled, sum(chunk.count == 1 for chunk in chunks), now_s - started_s)
        return self._commit(chunks, drawn, now_s)

    def export_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        copied = []
        for key, target in zip(keys, into, strict=True):
            found = self.pool.lookup((key,))
            for block in found:
                self.cache.read_block(block, target)
            copied.append(bool(found))
        return copied

    def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        data: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> tuple[int, StepOutput]:
        """How many leading blocks are there afterwards, and the events."""
        self.pool.now_s = time.monotonic()
        if parent != ROOT and not self.pool.contains(parent):
            return 0, StepOutput()
        # references keep the chain from being evicted to make room for its own end
        held = self.pool.acquire_chain(parent) if parent != ROOT else []
        above = len(held)
        done = 0
        try:
            for key, packed, content, one in zip(keys, tokens, data, said or [None] * len(keys), strict=True):
                present = self.pool.lookup((key,))
                if present:
                    self.pool.acquire(present)
                    held += present
                elif self.pool.available:
                    block = self.pool.allocate(1, held[-1] if held else None)[0]
                    held.append(block)
                    self.cache.write_block(block, content)
                    held[-1] = self.pool.register(block, key, parent, packed, one)
                else:
                    break
                parent = key
                done += 1
        finally:
            self.pool.release(held, unused=above)
        return done, StepOutput(blocks=self.pool.take_events())

    def touch(self, keys: Sequence[bytes], runs: Sequence[DirectiveRun]) -> int:
        """How many leading blocks are there."""
        self.pool.now_s = time.monotonic()
        found = self.pool.lookup(keys)
        self.pool.acquire(found)
        self.pool.use(found, Said(runs).of(0, len(found)))
        self.pool.release(found)
        return len(found)

    def drop_blocks(self, keys: Sequence[bytes]) -> tuple[int, StepOutput]:
        """How many are gone, and the events."""
        return self.pool.drop(keys), StepOutput(blocks=self.pool.take_events())

    def _forward(self, chunks: Sequence[Chunk]) -> list[Drawn | None]:
        """One Drawn per chunk that samples, None for the others."""
        step, rows = self._step_input(chunks)
        logits = self.model.forward(step)
        if not rows:
            if logits.device.type != "cpu":
                torch.cuda.synchronize(logits.device)  # so that an error shows in its own step
            return [None] * len(chunks)
        drawn = iter(sample(logits, rows))
        return [next(drawn) if chunk.samples else None for chunk in chunks]

    def _step_input(self, chunks: Sequence[Chunk]) -> tuple[StepInput, list[Row]]:
        size = self.info.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[Segment] = []
        sampled: list[int] = []
        rows: list[Row] = []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            table = sequence.table
            segments.append(Segment(len(tokens), chunk.count, end, table[: -(-end // size)]))
            tokens += sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            slots += [table[i // size] * size + i % size for i in range(chunk.start, end)]
            if chunk.samples:
                sampled.append(len(tokens) - 1)
                rows.append(Row(self._samplers[sequence.id], sequence.output, not sequence.may_stop))
        return StepInput(tokens, positions, slots, segments, sampled), rows

    def _commit(self, chunks: Sequence[Chunk], drawn: Sequence[Drawn | None], now_s: float) -> StepOutput:
        started: list[Started] = []
        deltas: list[Delta] = []
        ended: list[Ended] = []
        for chunk, result in zip(chunks, drawn, strict=True):
            sequence = chunk.sequence
            failed = result is not None and result.token is None
            if not failed:
                self.scheduler.computed(chunk)
            if not sequence.started:
                sequence.started = True
                onboarded = min(sequence.request.onboarded_tokens, sequence.cached_tokens)
                started.append(Started(sequence.id, sequence.cached_tokens, onboarded))
            if result is None:
                continue
            if result.token is None:
                ended.append(self._end(sequence, "error", error=self._no_token(sequence)))
            elif self._stops(sequence, result.token):
                ended.append(self._end(sequence, "stop", stop_token_id=result.token))
            else:
                deltas.append(self._append(sequence, result.token, result.logprob, now_s))
                ended += self._ends_now(sequence)
        return StepOutput(
            started=tuple(started), deltas=tuple(deltas), ended=tuple(ended), blocks=self.pool.take_events()
        )

    def _stops(self, sequence: TokenSequence, token: int) -> bool:
        """A guide lets a stop token pass only where it may come."""
        guide = self._samplers[sequence.id].guide
        if guide is not None:
            return token in sequence.stop_ids or guide.ends_with(token)
        return token in sequence.stop_ids and sequence.may_stop

    def _ends_now(self, sequence: TokenSequence) -> list[Ended]:
        guide = self._samplers[sequence.id].guide
        if guide is not None and guide.problem:
            return [self._end(sequence, "error", error=_grammar_failed(guide.problem))]
        if guide is not None and guide.is_over:
            return [self._end(sequence, "stop")]
        return [self._end(sequence, "length")] if sequence.is_full() else []

    def _no_token(self, sequence: TokenSequence) -> ErrorReply:
        guide = self._samplers[sequence.id].guide
        if guide is not None and guide.problem:
            return _grammar_failed(guide.problem)
        return ErrorReply(code=ErrorCode.INTERNAL, message="the model's output is not finite", retryable=True)

    def _append(self, sequence: TokenSequence, token: int, logprob: TokenLogprob | None, now_s: float) -> Delta:
        start = sequence.output
        sequence.append(token, now_s)
        self._samplers[sequence.id].accept(token)
        return Delta(sequence.id, start, pack_tokens((token,)), (logprob,) if logprob else ())

    def _end(
        self,
        sequence: TokenSequence,
        reason: str,
        *,
        stop_token_id: int | None = None,
        error: ErrorReply | None = None,
    ) -> Ended:
        self.scheduler.remove(sequence)
        del self._samplers[sequence.id]
        return sequence.ended(reason, time.monotonic(), stop_token_id=stop_token_id, error=error)

    def _trial(self, info: EngineInfo) -> tuple[float, float]:
        """Tokens per second of prefill and seconds of a decode step, on blocks that nobody uses yet."""
        count = min(_TRIAL_TOKENS, info.context_length - 1, info.max_batched_tokens)
        blocks = range(-(-(count + 1) // info.block_size))

        def run(start: int, end: int) -> float:
            span = range(start, end)
            segment = Segment(0, len(span), end, blocks[: -(-end // info.block_size)])
            begun_s = time.perf_counter()
            self.model.forward(StepInput([0] * len(span), span, span, [segment], [len(span) - 1])).argmax().item()
            return time.perf_counter() - begun_s

        # The first call of each kind sets things up, and others that start in the same moment may hold up the next ones.
        prefill_s = min([run(0, count) for _ in range(_TRIALS + 1)][1:])
        decode_s = min([run(count, count + 1) for _ in range(_TRIALS + 1)][1:])
        return count / prefill_s, decode_s


def _grammar_failed(problem: str) -> ErrorReply:
    """Another worker would come to the same end."""
    return ErrorReply(code=ErrorCode.INVALID_REQUEST, message=f"the grammar cannot be followed any further: {problem}")


def internal_error(error: BaseException) -> ErrorReply:
    return ErrorReply(code=ErrorCode.INTERNAL, message=f"the engine failed in a step: {error!r}", retryable=True)
