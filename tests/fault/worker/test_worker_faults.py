"""The worker when the bus, its engine or its own process fails."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvbus_blocks.retention import Directive
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Ended, StepFrame
from kvbus_wire.message import Decoder
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import MockOutput, Sampling, Stopping
from kvbus_wire.worker import Accepted, Generate, ReplayedSteps, ReplaySteps
from kvbus_worker.adapters.model_folder import ModelFolder
from kvbus_worker.app import start
from kvbus_worker.engines.base import DirectiveRun, Engine, EngineError, EngineInfo, EngineLoad, EngineRequest, StepSink
from kvbus_worker.settings import WorkerSettings

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4
_frames = Decoder.of(StepFrame)


class Reader:
    """A frontend that orders frames by their numbers and asks for those it missed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.frames: dict[int, StepFrame] = {}
        self.known = 0

    def on_frame(self, frame: StepFrame) -> None:
        self.known = max(self.known, frame.seq)
        if not frame.is_heartbeat:
            self.frames[frame.seq] = frame

    async def ask(self, request_id: str, **fields: Any) -> None:
        message = Generate(
            request_id=request_id,
            model="mock",
            frontend_id=self.service.instance_id,
            tokens=pack_tokens([1, 2, 3]),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=1000),
            deadline_ms=int((time.time() + 120) * 1000),
            mock=MockOutput(output=TEXT),
            **fields,
        )
        subject = self.service.bus.subjects.generate("w1")
        await self.service.bus.request(subject, message, Accepted, timeout_s=scaled(20.0))

    async def replay_missing(self) -> None:
        missing = [seq for seq in range(1, self.known + 1) if seq not in self.frames]
        if not missing:
            return
        message = ReplaySteps(
            frontend_id=self.service.instance_id,
            incarnation=next(iter(self.frames.values())).incarnation,
            first_seq=missing[0],
            last_seq=missing[-1],
        )
        reply = await self.service.bus.request(
            self.service.bus.subjects.control("w1"), message, ReplayedSteps, timeout_s=scaled(20.0)
        )
        for data in reply.frames:
            self.on_frame(_frames.decode(data))

    async def caught_up(self, request_id: str) -> Ended | None:
        await self.replay_missing()
        return self.ended(request_id)

    def ended(self, request_id: str) -> Ended | None:
        return next((e for f in self.frames.values() for e in f.ended if e.request_id == request_id), None)

    def text(self, request_id: str) -> str:
        tokens: list[int] = []
        for seq in sorted(self.frames):
            for delta in self.frames[seq].deltas:
                if delta.request_id == request_id:
                    assert delta.start == len(tokens)
                    tokens += unpack_tokens(delta.tokens)
        return bytes(tokens).decode()

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


async def _start_reader(service: Service, settings: CommonSettings) -> Reader:
    reader = Reader(service)
    await service.bus.subscribe(service.bus.subjects.steps(service.instance_id), (StepFrame,), reader.on_frame)
    return reader


def settings_for(url: str, namespace: str, **fields: Any) -> WorkerSettings:
    defaults: dict[str, Any] = {
        "nats": url,
        "namespace": namespace,
        "instance_id": "w1",
        "host_id": "h",
        "health_port": -1,
        "drain_timeout_s": 0.5,
        "engine": "mock",
        "mock_step_base_s": 0.02,
        "heartbeat_s": 0.2,
        "kv_blocks": 1024,
    }
    return WorkerSettings(**{**defaults, **fields})


@asynccontextmanager
async def reading(url: str, namespace: str) -> AsyncIterator[Reader]:
    common = CommonSettings(nats=url, namespace=namespace, health_port=-1)
    async with host("frontend", common, _start_reader) as hosted:
        assert isinstance(hosted.app, Reader)
        yield hosted.app


@pytest.fixture
async def own_server() -> AsyncIterator[NatsServer]:
    server = await asyncio.to_thread(NatsServer)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("wipe", [False, True])
async def test_a_restarted_bus_loses_no_token_and_the_worker_is_found_again(
    own_server: NatsServer, namespace: str, wipe: bool
) -> None:
    async with (
        reading(own_server.url, namespace) as reader,
        host("worker", settings_for(own_server.url, namespace), start) as worker,
    ):
        await reader.ask("r")
        await eventually(lambda: len(reader.frames) > 5, what="some frames")
        await asyncio.to_thread(own_server.restart, wipe=wipe)
        await eventually(lambda: reader.known > 100, timeout_s=60, what="the frames after the restart")

        await _until(lambda: reader.caught_up("r"))
        assert reader.text("r") == TEXT
        await eventually(
            lambda: (r := reader.service.directory.get("w1")) and r.worker, timeout_s=60, what="the worker's record"
        )
        record = reader.service.directory.get("w1")
        assert record is not None
        assert record.worker is not None
        assert record.incarnation == worker.service.incarnation
        bundle = record.worker.model.bundle
        objects = ObjectStore(reader.service.bus)
        await _until(lambda: objects.exists(bundle))
        await reader.ask("after")
        await eventually(lambda: reader.ended("after"), what="a request after the restart")


async def _until(check: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(scaled(60)):
        while not await check():
            await asyncio.sleep(0.02)


class BrokenEngine:
    """Accepts requests and breaks."""

    def __init__(self) -> None:
        self.broken = False
        self.stopped = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="mock",
            block_size=16,
            total_blocks=8,
            context_length=128,
            max_num_seqs=1,
            max_batched_tokens=16,
            kv_layout="x",
            block_bytes=0,
            prefill_tokens_per_s=1.0,
            decode_step_s=1.0,
        )

    async def start(self, sink: StepSink) -> None:
        self.sink = sink

    async def stop(self) -> None:
        self.stopped += 1

    def submit(self, request: EngineRequest) -> None:
        self.broken = True

    def cancel(self, request_id: str) -> None:
        pass

    def load(self) -> EngineLoad:
        if self.broken:
            raise RuntimeError("the engine is broken")
        return EngineLoad(
            running=0,
            waiting=0,
            waiting_tokens=0,
            used_blocks=0,
            total_blocks=8,
            prefill_tokens_per_s=1.0,
            decode_step_s=1.0,
        )

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        return 0

    async def export_blocks(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return [False] * len(keys)

    async def import_blocks(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        data: Sequence[memoryview],
        said: Sequence[Directive | None] = (),
    ) -> int:
        return 0

    def directives(self, keys: Sequence[bytes]) -> list[Directive]:
        return [Directive() for _ in keys]

    async def touch(self, keys: Sequence[bytes], directives: Sequence[DirectiveRun]) -> int:
        return 0

    async def drop_blocks(self, keys: Sequence[bytes]) -> int:
        return 0


def _always(engine: Engine) -> Callable[[WorkerSettings, ModelFolder], Engine]:
    return lambda settings, model: engine


async def test_a_broken_engine_ends_the_worker_with_its_cause(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BrokenEngine()
    monkeypatch.setattr("kvbus_worker.app.create_engine", _always(engine))
    settings = settings_for(nats_server.url, namespace, load_min_interval_s=0.01)

    async def run_until_it_breaks(reader: Reader) -> None:
        async with host("worker", settings, start):
            await reader.ask("r")
            await eventually(lambda: engine.stopped, what="the end of the worker")

    async with reading(nats_server.url, namespace) as reader:
        with pytest.raises(RuntimeError, match="the engine is broken"):
            await run_until_it_breaks(reader)
        assert engine.stopped


class RefusingEngine(BrokenEngine):
    """Never gives an end of its own, and refuses what is marked."""

    def submit(self, request: EngineRequest) -> None:
        if request.priority:
            raise EngineError(ErrorCode.UNSUPPORTED, "not this one")


async def test_an_engine_that_does_not_answer_a_cancellation_cannot_keep_a_drain_from_ending(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_worker.app.create_engine", _always(RefusingEngine()))
    async with reading(nats_server.url, namespace) as reader:
        async with host("worker", settings_for(nats_server.url, namespace), start) as worker:
            await reader.ask("r")
            assert isinstance(worker, RunningService)
        await eventually(lambda: reader.ended("r"), what="the end")
        ended = reader.ended("r")
        assert ended is not None
        assert ended.error is not None
        assert (ended.error.code, ended.error.retryable) == (ErrorCode.DRAINING, True)


def _arguments(nats_server: NatsServer, namespace: str, *more: str) -> list[str]:
    return ["--nats", nats_server.url, "--namespace", namespace, "--engine", "mock", "--instance-id", "w1", *more]


def test_sigterm_ends_an_idle_worker_at_once_with_status_0(nats_server: NatsServer, namespace: str) -> None:
    with ServiceProcess("kvbus_worker", _arguments(nats_server, namespace)) as process:
        process.wait_ready()
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        assert process.event("stopped") is not None


@pytest.mark.parametrize(
    "arguments",
    [("--mock-speedup", "-1"), ("--model", "/nowhere"), ("--engine", "steam"), ("--script", "/nowhere.jsonl")],
)
def test_a_configuration_that_cannot_work_ends_with_status_2(
    nats_server: NatsServer, namespace: str, arguments: tuple[str, ...]
) -> None:
    with ServiceProcess("kvbus_worker", _arguments(nats_server, namespace, *arguments)) as process:
        assert process.wait() == 2


async def test_a_killed_worker_leaves_the_directory_and_its_successor_takes_over(
    nats_server: NatsServer, namespace: str
) -> None:
    arguments = _arguments(nats_server, namespace, "--lease-ttl-s", "2", "--mock-step-base-s", "0.02")
    async with reading(nats_server.url, namespace) as reader:
        directory = reader.service.directory
        process = await asyncio.to_thread(ServiceProcess, "kvbus_worker", arguments)
        try:
            await asyncio.to_thread(process.wait_ready)
            await reader.ask("r")
            await eventually(lambda: reader.frames, what="the first frame")
            await asyncio.to_thread(process.kill)
            await eventually(lambda: directory.get("w1") is None, what="the end of its lease")
        finally:
            await asyncio.to_thread(process.stop)
        reader.frames.clear()
        async with host("worker", settings_for(nats_server.url, namespace), start) as worker:
            await reader.ask("r")
            await eventually(lambda: reader.ended("r"), what="the request on the successor")
            assert {frame.incarnation for frame in reader.frames.values()} == {worker.service.incarnation}
            assert reader.text("r") == TEXT
