"""What a worker makes of a prefill worker that answers wrongly, late, or not at all: it computes what did not come."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from kvbus_blocks.retention import Directive
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.log import get_logger
from kvbus_runtime.metrics import Metrics
from kvbus_testkit.timing import eventually
from kvbus_transfer import LimitReached, PeerLost, TransferTimeout, checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.subjects import Subjects
from kvbus_wire.transfer import BlocksReady, EndPrefill, NextBlocks, PrefillStarted, StartPrefill
from kvbus_wire.worker import Done, Generate, RemotePrefill
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.remote_prefill import Brought, PullLimits, RemotePrefiller
from kvbus_worker.core.admission import Admitted, ModelLimits
from kvbus_worker.engines.base import DirectiveRun, EngineError, EngineRequest

KEYS = [bytes([i + 1]) * 16 for i in range(8)]
BLOCK_BYTES = 32


def data(block: int) -> bytes:
    return bytes([block]) * BLOCK_BYTES


class Info(msgspec.Struct):
    block_size: int = 4
    block_bytes: int = BLOCK_BYTES
    handover: str = ""


class FakeEngine:
    """``room``: so many blocks can be imported."""

    def __init__(self) -> None:
        self.info = Info()
        self.blocks: dict[bytes, bytes] = {}
        self.said: dict[bytes, Directive | None] = {}
        self.room = len(KEYS)
        self.breaks = False

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    async def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        views: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> int:
        if self.breaks:
            raise EngineError(ErrorCode.INTERNAL, "broken")
        assert not parent or parent in self.blocks
        done = 0
        self.said.update(zip(keys, said, strict=True))
        for key, view in zip(keys, views, strict=True):
            if len(self.blocks) >= self.room:
                break
            self.blocks[key] = bytes(view)
            done += 1
        return done


class FakeThere:
    """The prefill worker, its bus and its memory. ``spoil`` changes answers; ``fail``: what is raised instead of one."""

    def __init__(self) -> None:
        self.subjects = Subjects("test")
        self.asked: list[Any] = []
        self.ended: list[str] = []
        self.spoil: Callable[[BlocksReady], BlocksReady] = lambda ready: ready
        self.fail: dict[type[Any], Exception] = {}
        self.read_fails: Exception | None = None
        self.flip = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.finished = 0

    async def request(self, subject: str, message: Any, *replies: Any, timeout_s: float, in_parts: bool = False) -> Any:
        self.asked.append(message)
        if type(message) in self.fail:
            raise self.fail[type(message)]
        match message:
            case StartPrefill():
                return PrefillStarted(prefill_id=message.prefill_id, incarnation=1, cached_blocks=2)
            case NextBlocks():
                await self.hold.wait()
                count = min(2, message.most, len(KEYS) - message.first)
                sums = tuple(checksum(data(i)) for i in range(message.first, message.first + count))
                grant = bytes([message.first, count])
                return self.spoil(
                    BlocksReady(
                        prefill_id=message.prefill_id, first=message.first, count=count, grant=grant, checksums=sums
                    )
                )
            case EndPrefill():
                self.ended.append(message.reason)
                return Done()
        raise AssertionError(message)

    async def read(
        self, grant: bytes, indices: Sequence[int], targets: Sequence[Any], *, deadline_s: float, layout: str
    ) -> str:
        if self.read_fails is not None:
            raise self.read_fails
        first, _ = grant
        for index, target in zip(indices, targets, strict=True):
            target[:] = data(first + index)
            if self.flip:
                target[3] ^= 1
        return "fake"

    async def finish(self, grant: bytes) -> None:
        self.finished += 1


class Scene:
    def __init__(self, **limits: Any) -> None:
        self.engine = FakeEngine()
        self.there = FakeThere()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.metrics = Metrics("worker")
        engine, there = self.engine, self.there
        defaults: dict[str, Any] = {
            "request_timeout_s": 1.0,
            "stall_s": 0.05,
            "lease_s": 5.0,
            "wait_s": 0.02,
            "chunk_blocks": 2,
            "min_blocks": 2,
            "parallel": 4,
            "rest_s": 0.1,
            "forget_s": 100.0,
        }
        anything: Any = (there, engine, there)
        bus, fake_engine, reader = anything
        self.remote = RemotePrefiller(
            bus,
            fake_engine,
            reader,
            ModelLimits(
                name="m",
                fingerprint="f",
                kv_layout="l",
                block_size=4,
                context_length=1000,
                vocab_size=0,
                engine="fake",
            ),
            PullLimits(**{**defaults, **limits}),
            instance_id="d",
            spawn=self._spawn,
            metrics=WorkerMetrics(self.metrics),
            log=get_logger(service="worker"),
        )

    def _spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        return task

    def ask(self, prefill: str = "p", keys: Sequence[bytes] = KEYS) -> tuple[Generate, Admitted]:
        tokens = list(range(len(keys) * 4 + 1))
        message = Generate(
            request_id="r",
            model="m",
            frontend_id="f",
            tokens=pack_tokens(tokens),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=1),
            deadline_ms=2**50,
            prefill=RemotePrefill(worker_id=prefill, incarnation=1, tokens=32) if prefill else None,
        )
        request = EngineRequest(
            request_id="r",
            tokens=tokens,
            domain_key=b"",
            sampling=Sampling(),
            stopping=Stopping(max_tokens=1),
            directives=(DirectiveRun(3, None, Directive("ephemeral")),),
        )
        return message, Admitted(request, pack_tokens(tokens), list(keys))

    async def bring(self) -> Brought:
        bringing = self.remote.begin(*self.ask())
        assert bringing is not None
        brought = await self.remote.bring(bringing)
        await asyncio.gather(*self.tasks)
        assert len(self.remote._coming) == 0
        assert self.metrics.value("remote_prefill_pulls_open") == 0
        for key, block in self.engine.blocks.items():
            assert block == data(KEYS.index(key)), "a block that is not whole was imported"
        return brought

    def outcomes(self, outcome: str) -> float:
        return self.metrics.value("remote_prefill_pulls_total", {"outcome": outcome})


async def test_a_prompt_comes_chunk_by_chunk_and_what_was_read_is_given_up() -> None:
    scene = Scene()
    brought = await scene.bring()
    assert (brought.tokens, brought.computed, brought.worker_id) == (32, 24, "p")
    assert [(m.first, m.received) for m in scene.there.asked if isinstance(m, NextBlocks)] == [
        (0, 0),
        (2, 0),
        (4, 2),
        (6, 4),
    ]
    assert scene.there.ended == ["done"]
    assert scene.there.finished == 4
    assert scene.remote.rates["remote"] > 0
    assert scene.remote.handover_s > 0


@pytest.mark.parametrize(
    ("outcome", "spoil"),
    [
        ("corrupt", lambda ready: msgspec.structs.replace(ready, checksums=(1, 2))),
        ("corrupt", lambda ready: msgspec.structs.replace(ready, checksums=(1,))),
        ("bad_answer", lambda ready: msgspec.structs.replace(ready, first=5)),
        ("bad_answer", lambda ready: msgspec.structs.replace(ready, count=100)),
        ("bad_answer", lambda ready: msgspec.structs.replace(ready, count=3, checksums=())),
        ("bad_answer", lambda ready: msgspec.structs.replace(ready, count=-1)),
        ("stalled", lambda ready: msgspec.structs.replace(ready, count=0, done=False)),
        ("bad_answer", lambda ready: msgspec.structs.replace(ready, count=0, done=True)),
    ],
)
async def test_a_wrong_answer_brings_nothing(outcome: str, spoil: Callable[[BlocksReady], BlocksReady]) -> None:
    scene = Scene()
    scene.there.spoil = spoil
    brought = await scene.bring()
    assert (brought.tokens, brought.worker_id) == (0, "")
    assert scene.outcomes(outcome) == 1
    assert scene.there.ended == [outcome]


@pytest.mark.parametrize(
    ("outcome", "error"), [("peer_lost", PeerLost("gone")), ("transfer_timeout", TransferTimeout("late"))]
)
async def test_a_transfer_that_fails_brings_nothing(outcome: str, error: Exception) -> None:
    scene = Scene()
    scene.there.read_fails = error
    assert (await scene.bring()).tokens == 0
    assert scene.outcomes(outcome) == 1


async def test_a_flipped_bit_is_noticed_and_what_came_before_is_kept() -> None:
    scene = Scene()

    def later(ready: BlocksReady) -> BlocksReady:
        scene.there.flip = ready.first >= 4
        return ready

    scene.there.spoil = later
    brought = await scene.bring()
    assert brought.tokens < 32
    assert scene.outcomes("corrupt") == 1


@pytest.mark.parametrize("asked", [StartPrefill, NextBlocks])
@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.GONE])
async def test_a_refusal_brings_nothing(asked: type[Any], code: ErrorCode) -> None:
    scene = Scene()
    scene.there.fail[asked] = RequestFailed.of(code, "no")
    assert (await scene.bring()).tokens == 0
    assert scene.outcomes(str(code)) == 1


async def test_an_end_that_cannot_be_told_is_left_to_the_lease() -> None:
    scene = Scene()
    scene.there.fail[EndPrefill] = RequestFailed.of(ErrorCode.UNAVAILABLE, "gone")
    assert (await scene.bring()).tokens == 32


async def test_what_has_no_room_here_is_computed_here() -> None:
    scene = Scene()
    scene.engine.room = 3
    brought = await scene.bring()
    assert (brought.tokens, brought.computed) == (12, 4)
    assert scene.outcomes("no_room") == 1
    broken = Scene()
    broken.engine.breaks = True
    assert (await broken.bring()).tokens == 0
    assert broken.outcomes("not_imported") == 1


async def test_others_wait_for_what_comes_and_are_woken_when_it_does_not() -> None:
    scene = Scene(stall_s=30.0)
    scene.there.hold.clear()
    first = scene.remote.begin(*scene.ask())
    second = scene.remote.begin(*scene.ask(prefill=""))
    assert first is not None
    assert second is not None
    tasks = [asyncio.create_task(scene.remote.bring(each)) for each in (first, second)]
    await eventually(lambda: any(isinstance(m, NextBlocks) for m in scene.there.asked), what="the question")
    assert not tasks[1].done()
    tasks[0].cancel()
    assert (await tasks[1]) == Brought()
    await asyncio.gather(*tasks, *scene.tasks, return_exceptions=True)
    assert scene.there.ended == ["cancelled"]
    assert len(scene.remote._coming) == 0


async def test_a_request_that_ends_before_anything_was_asked_keeps_nobody_waiting() -> None:
    scene = Scene()
    bringing = scene.remote.begin(*scene.ask())
    assert bringing is not None
    scene.remote.close(bringing)
    scene.remote.close(bringing)
    assert scene.remote.begin(*scene.ask(prefill="")) is None


async def test_limits_of_pulls() -> None:
    scene = Scene(parallel=1, stall_s=30.0)
    assert scene.remote.begin(*scene.ask(prefill="d")) is None, "nobody asks itself"
    assert scene.remote.begin(*scene.ask(keys=KEYS[:1])) is None, "too short"
    scene.there.hold.clear()
    first = scene.remote.begin(*scene.ask(keys=KEYS[:4]))
    assert first is not None
    task = asyncio.create_task(scene.remote.bring(first))
    await eventually(lambda: scene.metrics.value("remote_prefill_pulls_open") == 1, what="the pull")
    other = [bytes([i + 100]) * 16 for i in range(8)]
    assert scene.remote.begin(*scene.ask(keys=other)) is None
    assert scene.outcomes("skipped") == 1
    scene.there.hold.set()
    await task
    await asyncio.gather(*scene.tasks)


async def test_a_worker_that_cannot_be_reached_is_left_alone_for_a_while() -> None:
    scene = Scene(rest_s=0.1)
    scene.there.read_fails = PeerLost("gone")
    await scene.bring()
    assert scene.remote.begin(*scene.ask()) is None
    assert scene.outcomes("resting") >= 1
    scene.there.read_fails = None
    await eventually(lambda: scene.remote.begin(*scene.ask()) is not None, what="the next try")


async def test_limits_of_its_own_and_refusals_are_not_blamed_on_the_other_worker() -> None:
    for failure in (LimitReached("full", own=True), RequestFailed.of(ErrorCode.OVERLOADED, "full", retryable=True)):
        scene = Scene(rest_s=100.0)
        if isinstance(failure, LimitReached):
            scene.there.read_fails = failure
        else:
            scene.there.fail[StartPrefill] = failure
        await scene.bring()
        assert scene.remote.begin(*scene.ask()) is not None


async def test_what_was_measured_long_ago_is_forgotten() -> None:
    scene = Scene(forget_s=0.05)
    await scene.bring()
    await eventually(lambda: not scene.remote.rates and not scene.remote.handover_s, what="the end of old rates")


async def test_a_slow_start_that_is_forgotten_does_not_count_any_more() -> None:
    """Else one moment of trouble would keep routers from pairing the two for ever: nothing is measured where nothing is asked."""
    scene = Scene()
    scene.remote._handover_s = 1000.0
    scene.remote._measured_at = -1000.0
    await scene.bring()
    assert 0 < scene.remote.handover_s < 100


async def test_what_is_said_of_blocks_holds_from_when_they_come() -> None:
    """They may be evicted, or written through, before the request is admitted."""
    scene = Scene()
    await scene.bring()
    assert [said.kind if said else None for said in scene.engine.said.values()] == [None] * 3 + ["ephemeral"] * 5
