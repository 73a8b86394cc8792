"""Compiling grammars beside the running batch, and keeping the compiled ones.

check     each part that a request wrote, in a process that may die of it (`grammar_check`): time, memory, depth
compile   the whole grammar with the model's vocabulary, in a thread; cheap for parts that have passed
guide     a copy per sequence, which is then led through the tokens that a migrated request brought along
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import llguidance
import msgspec
import structlog

from kvbus_wire.errors import ErrorCode
from kvbus_wire.guidance import Guidance
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.torch.grammar import BadGrammar, compose, parser_limits, sources
from kvbus_worker.engines.torch.grammar_check import plain_problem
from kvbus_worker.engines.torch.grammar_checker import GrammarChecker
from kvbus_worker.engines.torch.guide import Guide
from kvbus_worker.engines.torch.settings import TOKENIZER, GrammarLimits

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_STACK_BYTES = 64 << 20
"""The compiler recurses as deep as a grammar's rules do. What has passed `grammar_check`, which has less, fits here."""
_ENCODER = msgspec.msgpack.Encoder()


class Vocabulary:
    """The model's tokenizer as grammars need it. Reading one takes about a second."""

    def __init__(self, path: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        text = path.read_text(encoding="utf-8")
        self.tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        self.eos_ids = tuple(self.tokenizer.eos_tokens)
        added = msgspec.json.decode(text, type=_Added).added_tokens
        self.specials = {
            token.content: token.id
            for token in added
            if token.id < vocab_size and self.tokenizer.is_special_token(token.id)
        }


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _Compiled(msgspec.Struct, frozen=True):
    """A grammar, or why there is none. ``matcher`` is only ever copied."""

    size_bytes: int
    matcher: llguidance.LLMatcher | None = None
    refusal: EngineError | None = None


class Grammars:
    """Makes guides. All methods are for the event loop."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits) -> None:
        self._path = model_dir / TOKENIZER
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._limits = limits
        self._vocabulary: Vocabulary | None = None
        self._checker = GrammarChecker(limits.check_s, limits.check_bytes)
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._bytes = 0
        self._building: dict[bytes, asyncio.Task[_Compiled]] = {}
        self._turn = asyncio.Lock()
        self._threads = _threads()
        self.waiting = 0

    def check(self, guidance: Guidance) -> None:
        """Raise EngineError for what is not even tried."""
        size = sum(len(source.text.encode()) for source in sources(guidance))
        if size > self._limits.source_bytes:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"schemas and grammars have {size} bytes; at most {self._limits.source_bytes} are compiled",
                param=guidance.param or "tools",
            )
        if self.waiting >= self._limits.waiting:
            raise EngineError(
                ErrorCode.OVERLOADED,
                f"{self.waiting} requests wait for their grammars already",
                retryable=True,
                waiting=self.waiting,
            )

    async def guide(self, guidance: Guidance, output: Sequence[int]) -> Guide:
        """A guide behind ``output``. Raise EngineError for what no output can follow."""
        self.waiting += 1
        try:
            compiled = await self._get(guidance)
            if compiled.refusal is not None:
                raise compiled.refusal
            guide = await self._in_thread(lambda: self._started(compiled, output))
        finally:
            self.waiting -= 1
        if output and guide.problem:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"the output so far does not follow the grammar: {guide.problem}",
                param="resumed",
            )
        return guide

    async def close(self) -> None:
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        await self._checker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # compiling

    async def _get(self, guidance: Guidance) -> _Compiled:
        key = _ENCODER.encode(guidance)
        found = self._compiled.get(key)
        if found is not None:
            self._compiled.move_to_end(key)
            return found
        task = self._building.get(key)
        if task is None:
            task = self._building[key] = asyncio.create_task(self._build(key, guidance), name="grammar")
            task.add_done_callback(lambda _: self._building.pop(key, None))
        return await asyncio.shield(task)  # others may wait for it as well

    async def _build(self, key: bytes, guidance: Guidance) -> _Compiled:
        """Never raises: perhaps nobody waits for it any more."""
        try:
            async with self._turn:
                compiled = await self._compile(guidance, len(key))
        except EngineError as error:
            return _Compiled(len(key), refusal=error)
        except Exception as error:
            _log.exception("compiling a grammar failed")
            failure = EngineError(ErrorCode.INTERNAL, f"compiling a grammar failed: {error!r}", retryable=True)
            return _Compiled(len(key), refusal=failure)
        self._keep(key, compiled)
        return compiled

    async def _compile(self, guidance: Guidance, size_bytes: int) -> _Compiled:
        try:
            for source in sources(guidance):
                await self._checker.check(source)
            vocabulary = self._vocabulary
            if vocabulary is None:
                vocabulary = self._vocabulary = await self._in_thread(self._read_vocabulary)
            matcher = await self._in_thread(lambda: compile_grammar(guidance, vocabulary))
        except BadGrammar as problem:
            return _Compiled(
                size_bytes, refusal=EngineError(ErrorCode.INVALID_REQUEST, str(problem), param=problem.param)
            )
        return _Compiled(size_bytes, matcher)

    def _read_vocabulary(self) -> Vocabulary:
        try:
            return Vocabulary(self._path, self._vocab_size, self._eos_ids)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise EngineError(
                ErrorCode.UNSUPPORTED, f"{self._path.name} cannot be used for guidance: {error}"
            ) from error

    def _keep(self, key: bytes, compiled: _Compiled) -> None:
        self._compiled[key] = compiled
        self._bytes += compiled.size_bytes
        while self._bytes > self._limits.cache_bytes or len(self._compiled) > self._limits.cache_entries:
            _, oldest = self._compiled.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def _started(self, compiled: _Compiled, output: Sequence[int]) -> Guide:
        assert compiled.matcher is not None  # noqa: S101 - refusals were raised
        guide = Guide(compiled.matcher.deep_copy(), self._vocabulary.eos_ids if self._vocabulary else ())
        if output:
            guide.accept(output)
        return guide

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def compile_grammar(guidance: Guidance, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Raise BadGrammar."""
    grammar = compose(guidance, vocabulary.specials, vocabulary.eos_ids)
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # builds what every copy would have to build for its first token
    if matcher.is_error():
        raise BadGrammar(f"the grammar cannot be followed: {plain_problem(matcher.get_error())}", guidance.param)
    return matcher


def _threads() -> ThreadPoolExecutor:
    """One to compile in and one to make guides, with stacks of their own size."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        both = threading.Barrier(3)
        threads.submit(both.wait)
        threads.submit(both.wait)
        both.wait()
    finally:
        threading.stack_size(before)
    return threads
