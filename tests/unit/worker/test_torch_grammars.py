"""Compiling beside the batch: trying grammars out at bounded cost, keeping compiled ones."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("torch")

from kvbus_testkit.timing import scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.guidance import Guidance
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.torch import grammars as grammars_module
from kvbus_worker.engines.torch.grammar import BadGrammar, Source
from kvbus_worker.engines.torch.grammar_checker import PATIENCE, GrammarChecker
from kvbus_worker.engines.torch.grammars import Grammars
from kvbus_worker.engines.torch.settings import GrammarLimits
from kvbus_worker.models import tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEEP_RULES = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(20_000)) + '\nr20000: "z"'
MANY_BRANCHES = "start: A\nA: " + "&".join(f"/(.*a.{{{i}}}).*/" for i in range(1, 40))
LONG_PATTERN = "a?" * 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(limit_s=1, limit_bytes=1 << 30, patience=scaled(PATIENCE))
    yield checker
    await checker.close()


@pytest.mark.parametrize(
    "source",
    [
        Source("json", '{"type":"object"}'),
        Source("json", json.dumps({"enum": [f"choice {i}" for i in range(5000)]})),
        Source(
            "json", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}})
        ),
        Source("regex", "[a-z]+@[a-z]+\\.(com|org)"),
        Source("lark", 'start: "a" start | "b"'),
    ],
)
async def test_ordinary_grammars_pass(checker: GrammarChecker, source: Source) -> None:
    await checker.check(source)


@pytest.mark.parametrize(
    "source",
    [Source("lark", DEEP_RULES), Source("regex", LONG_PATTERN)],
    ids=["stack", "time and memory"],
)
async def test_a_grammar_that_would_take_the_worker_down_takes_only_the_check_down(
    checker: GrammarChecker, source: Source
) -> None:
    with pytest.raises(BadGrammar, match="too expensive"):
        await checker.check(source)
    await checker.check(Source("regex", "next"))


async def test_a_problem_says_what_it_is(checker: GrammarChecker) -> None:
    with pytest.raises(BadGrammar) as caught:
        await checker.check(Source("json", '{"uniqueItems": true}', strict=True, param="text.format"))
    assert caught.value.param == "text.format"
    assert "uniqueItems" in str(caught.value)


async def test_a_cancelled_check_ends_its_process(checker: GrammarChecker) -> None:
    await checker.check(Source("regex", "a"))
    child = checker._child
    assert child is not None
    task = asyncio.create_task(checker.check(Source("lark", MANY_BRANCHES)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert child.returncode is not None
    await checker.check(Source("regex", "a"))


async def test_closing_leaves_no_process(checker: GrammarChecker) -> None:
    own = GrammarChecker(limit_s=1, limit_bytes=1 << 30, patience=scaled(PATIENCE))
    await own.check(Source("regex", "a"))
    child = own._child
    assert child is not None
    await own.close()
    await own.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


class Counted(Grammars):
    """Counts what is compiled."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        super().__init__(folder, tiny.VOCAB_SIZE, (2, 0), GrammarLimits(**limits))
        self.compiled: list[str] = []

    async def _compile(self, guidance: Guidance, size_bytes: int) -> Any:
        self.compiled.append(guidance.text)
        return await super()._compile(guidance, size_bytes)


def pattern(text: str) -> Guidance:
    return Guidance(form="regex", text=text)


async def test_a_grammar_is_compiled_once(folder: Path) -> None:
    grammars = Counted(folder)
    guides = await asyncio.gather(*(grammars.guide(pattern("ab"), ()) for _ in range(5)))
    await grammars.guide(pattern("ab"), ())
    assert grammars.compiled == ["ab"]
    assert len({id(guide) for guide in guides}) == 5
    await grammars.close()


async def test_guides_of_one_grammar_go_their_own_ways(folder: Path) -> None:
    grammars = Counted(folder)
    first = await grammars.guide(pattern("[ab]b"), ())
    second = await grammars.guide(pattern("[ab]b"), ())
    a, b = (7 + index for index in (ord("a"), ord("b")))
    assert first.accept((a, b))
    assert first.is_over
    assert second.accept((b,))
    assert not second.is_over
    await grammars.close()


ENTRY_BYTES = len(msgspec.msgpack.encode(pattern("a1")))


@pytest.mark.parametrize("limits", [{"cache_entries": 2}, {"cache_bytes": 2 * ENTRY_BYTES}])
async def test_the_least_recently_used_grammar_is_forgotten(folder: Path, limits: dict[str, int]) -> None:
    grammars = Counted(folder, **limits)
    for text in ("a1", "a2", "a1", "a3", "a1", "a2"):
        await grammars.guide(pattern(text), ())
    assert grammars.compiled == ["a1", "a2", "a3", "a2"]
    await grammars.close()


async def test_a_refusal_is_kept_as_well(folder: Path) -> None:
    grammars = Counted(folder)
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await grammars.guide(pattern("("), ())
        assert caught.value.reply.code is ErrorCode.INVALID_REQUEST
    assert grammars.compiled == ["("]
    await grammars.close()


async def test_a_compilation_goes_on_when_the_first_to_ask_has_gone(folder: Path) -> None:
    grammars = Counted(folder)
    first = asyncio.create_task(grammars.guide(pattern("ab"), ()))
    second = asyncio.create_task(grammars.guide(pattern("ab"), ()))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert grammars.compiled == ["ab"]
    await grammars.close()


async def test_a_failure_of_our_own_is_told_and_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Counted(folder)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(grammars_module, "compose", broken)
        with pytest.raises(EngineError) as caught:
            await grammars.guide(pattern("ab"), ())
    assert caught.value.reply.code is ErrorCode.INTERNAL
    assert caught.value.reply.retryable
    assert await grammars.guide(pattern("ab"), ())
    await grammars.close()
