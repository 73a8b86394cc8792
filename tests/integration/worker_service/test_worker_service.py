"""The worker service with the mock engine on a real bus, seen from a frontend, an indexer and a router."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_tokenizers import byte_level_bundle, load_tokenizer, pack_bundle, unpack_bundle
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Ended, StepFrame
from kvbus_wire.kv_events import KvEvents, Removed, Stored, decode_events
from kvbus_wire.load import LoadReport
from kvbus_wire.message import Decoder
from kvbus_wire.packing import pack_tokens, unpack_keys, unpack_tokens
from kvbus_wire.records import InstanceRecord
from kvbus_wire.request import MockOutput, Sampling, Stopping
from kvbus_wire.worker import (
    Accepted,
    BlockSnapshot,
    BlockSnapshotChunk,
    Cancel,
    Done,
    Drain,
    Generate,
    NeedTokens,
    ReplayedSteps,
    ReplaySteps,
)
from kvbus_worker.adapters.engines import create_engine
from kvbus_worker.adapters.model_folder import ModelFolder
from kvbus_worker.app import WorkerApp, start
from kvbus_worker.engines.base import Engine
from kvbus_worker.settings import WorkerSettings

TOKENIZER = load_tokenizer(byte_level_bundle())
SLOW = {"mock_step_base_s": 0.02}
_frames = Decoder.of(StepFrame)


class Frontend:
    """Reads step frames and remembers what they said."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.bus = service.bus
        self.id = service.instance_id
        self.frames: list[StepFrame] = []
        self.output: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ended: dict[str, Ended] = {}
        self.loads: list[LoadReport] = []

    def on_frame(self, frame: StepFrame) -> None:
        self.frames.append(frame)
        for started in frame.started:
            self.cached[started.request_id] = started.cached_tokens
        for delta in frame.deltas:
            output = self.output.setdefault(delta.request_id, [])
            assert delta.start == len(output)
            output += unpack_tokens(delta.tokens)
        for ended in frame.ended:
            assert ended.request_id not in self.ended, "a request ended twice"
            self.ended[ended.request_id] = ended

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass

    def generate(self, request_id: str, ids: list[int], /, **fields: Any) -> Generate:
        base = Generate(
            request_id=request_id,
            model="mock",
            frontend_id=self.id,
            tokens=pack_tokens(ids),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=1000),
            deadline_ms=int((time.time() + 60) * 1000),
        )
        return msgspec.structs.replace(base, **fields)

    async def send(self, worker: str, message: Generate) -> Any:
        subject = self.bus.subjects.generate(worker)
        return await self.bus.request(subject, message, Accepted, NeedTokens, timeout_s=scaled(10.0), in_parts=True)

    async def control(self, worker: str, message: Any, reply: type[Any]) -> Any:
        return await self.bus.request(self.bus.subjects.control(worker), message, reply, timeout_s=scaled(10.0))

    async def end_of(self, request_id: str) -> Ended:
        await eventually(lambda: request_id in self.ended, what=f"the end of {request_id}")
        return self.ended[request_id]

    def text(self, request_id: str) -> str:
        return TOKENIZER.decode(self.output.get(request_id, []))


async def _start_frontend(service: Service, settings: CommonSettings) -> Frontend:
    frontend = Frontend(service)
    await service.bus.subscribe(service.bus.subjects.steps(service.instance_id), (StepFrame,), frontend.on_frame)
    await service.bus.subscribe(service.bus.subjects.load("*"), (LoadReport,), frontend.loads.append)
    await service.register()
    return frontend


def worker_settings(nats_server: NatsServer, namespace: str, **fields: Any) -> WorkerSettings:
    defaults: dict[str, Any] = {
        "nats": nats_server.url,
        "namespace": namespace,
        "instance_id": "w1",
        "host_id": "h",
        "health_port": -1,
        "drain_timeout_s": 0.2,
        "engine": "mock",
        "mock_speedup": float("inf"),
        "kv_blocks": 4096,
        "frontend_grace_s": 0.1,
    }
    return WorkerSettings(**{**defaults, **fields})


class Stage:
    """One worker and one frontend; more of either by the hosts of the test."""

    def __init__(self, frontend: Frontend, worker: WorkerApp, service: Service) -> None:
        self.frontend = frontend
        self.worker = worker
        self.service = service

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.value(name, labels or None)


@asynccontextmanager
async def stage(nats_server: NatsServer, namespace: str, **fields: Any) -> AsyncIterator[Stage]:
    settings = worker_settings(nats_server, namespace, **fields)
    common = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="f1", health_port=-1)
    async with host("frontend", common, _start_frontend) as frontend, host("worker", settings, start) as worker:
        assert isinstance(frontend.app, Frontend)
        assert isinstance(worker.app, WorkerApp)
        yield Stage(frontend.app, worker.app, worker.service)


def domain(record: InstanceRecord, salt: str = "") -> bytes:
    assert record.worker is not None
    card = record.worker.model
    return CacheDomain(
        model_fingerprint=card.fingerprint, block_size=card.block_size, kv_layout=card.kv_layout, salt=salt
    ).key()


async def _record(frontend: Frontend, worker: str = "w1") -> InstanceRecord:
    def known() -> InstanceRecord | None:
        record = frontend.service.directory.get(worker)
        return record if record is not None and record.worker is not None else None

    await eventually(known, what="the worker's record")
    record = known()
    assert record is not None
    return record


async def test_what_a_worker_loads_is_known_before_it_is_loaded(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()

    def slow(settings: WorkerSettings, model: ModelFolder) -> Engine:
        assert loaded.wait(scaled(30))
        return create_engine(settings, model)

    monkeypatch.setattr("kvbus_worker.app.create_engine", slow)
    common = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="f1", health_port=-1)
    settings = worker_settings(nats_server, namespace)
    async with AsyncExitStack() as stack:
        frontend = await stack.enter_async_context(host("frontend", common, _start_frontend))
        directory = frontend.service.directory
        starting = asyncio.create_task(stack.enter_async_context(host("worker", settings, start)))
        await eventually(lambda: directory.get("w1"), what="the worker's record")
        record = directory.get("w1")
        loaded.set()
        await starting
        assert record is not None
        assert (record.loading, record.worker) == (settings.model_name, None)
        assert isinstance(frontend.app, Frontend)
        assert (await _record(frontend.app)).loading == ""


async def test_a_request_is_accepted_streamed_and_ended(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace) as at:
        reply = await at.frontend.send(
            "w1", at.frontend.generate("r", TOKENIZER.encode("hi"), mock=MockOutput(output="hello"))
        )
        assert reply == Accepted(request_id="r", incarnation=at.service.incarnation)
        ended = await at.frontend.end_of("r")
        assert (ended.reason, at.frontend.text("r")) == ("stop", "hello")
        assert (ended.usage.prompt_tokens, ended.usage.output_tokens) == (2, 5)
        assert [frame.seq for frame in at.frontend.frames if not frame.is_heartbeat] == list(
            range(1, 1 + sum(not frame.is_heartbeat for frame in at.frontend.frames))
        )
        assert at.metric("requests_ended_total", reason="stop") == 1
        assert at.metric("tokens_total", kind="decode") == 5


async def test_one_frame_carries_a_whole_step_for_a_frontend(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, **SLOW, mock_speedup=1.0) as at:
        for number in range(8):
            await at.frontend.send("w1", at.frontend.generate(f"r{number}", [number], mock=MockOutput(output="x" * 20)))
        for number in range(8):
            await at.frontend.end_of(f"r{number}")
        assert max(len(frame.deltas) for frame in at.frontend.frames) == 8


async def test_a_repeated_generate_runs_once(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace) as at:
        message = at.frontend.generate("r", [1, 2, 3], mock=MockOutput(output="once"))
        first = await at.frontend.send("w1", message)
        await at.frontend.end_of("r")
        assert await at.frontend.send("w1", message) == first
        await at.frontend.send("w1", at.frontend.generate("other", [1], mock=MockOutput(output="x")))
        await at.frontend.end_of("other")
        assert at.frontend.text("r") == "once"
        assert at.metric("requests_repeated_total") == 1


async def test_only_the_tokens_after_a_known_prefix_need_to_be_sent(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace) as at:
        prompt = [i % 250 for i in range(200)]
        await at.frontend.send("w1", at.frontend.generate("a", prompt, mock=MockOutput(output="y")))
        await at.frontend.end_of("a")
        keys = chain_keys(domain(await _record(at.frontend)), pack_tokens(prompt), 16)
        suffix = [*prompt[192:], 7, 8]
        message = at.frontend.generate("b", suffix, prefix_key=keys[11], prefix_tokens=192, mock=MockOutput(output="z"))
        assert isinstance(await at.frontend.send("w1", message), Accepted)
        ended = await at.frontend.end_of("b")
        assert (ended.usage.prompt_tokens, ended.usage.cached_tokens) == (202, 192)


async def test_a_prefix_that_is_gone_asks_for_all_tokens(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace) as at:
        message = at.frontend.generate("r", [1], prefix_key=b"k" * 16, prefix_tokens=16)
        assert await at.frontend.send("w1", message) == NeedTokens(request_id="r")
        again = at.frontend.generate("r", [1] * 17, mock=MockOutput(output="ok"))
        assert isinstance(await at.frontend.send("w1", again), Accepted)
        await at.frontend.end_of("r")
        assert at.frontend.text("r") == "ok"


async def test_a_prompt_above_the_payload_limit_is_taken_in_parts(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, context_length=400_000, kv_blocks=30_000) as at:
        message = at.frontend.generate("r", [i * 7 % 250 for i in range(300_000)], mock=MockOutput(output="long"))
        assert len(message.tokens) > at.frontend.bus.max_payload
        assert isinstance(await at.frontend.send("w1", message), Accepted)
        ended = await at.frontend.end_of("r")
        assert (ended.usage.prompt_tokens, at.frontend.text("r")) == (300_000, "long")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, ErrorCode.MODEL_NOT_FOUND),
        ({"tokens": pack_tokens([999])}, ErrorCode.INVALID_REQUEST),
        ({"tokens": pack_tokens([1] * 140_000)}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"deadline_ms": 1}, ErrorCode.DEADLINE_EXCEEDED),
        ({"mock": MockOutput(output="x", finish="perhaps")}, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_what_cannot_run_is_a_typed_refusal_and_leaves_nothing_behind(
    nats_server: NatsServer, namespace: str, fields: dict[str, Any], code: ErrorCode
) -> None:
    async with stage(nats_server, namespace) as at:
        with pytest.raises(RequestFailed) as caught:
            await at.frontend.send("w1", at.frontend.generate("r", [1], **fields))
        assert caught.value.code is code
        assert at.metric("requests_open") == 0
        assert at.metric("requests_refused_total", code=str(code)) == 1
        good = at.frontend.generate("r", [1], mock=MockOutput(output="fine"))
        assert isinstance(await at.frontend.send("w1", good), Accepted)


async def test_cancelling_ends_the_request_and_is_idempotent(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, **SLOW, mock_speedup=1.0) as at:
        await at.frontend.send("w1", at.frontend.generate("r", [1], mock=MockOutput(output="x" * 900)))
        await eventually(lambda: at.frontend.output.get("r"), what="the first token")
        for _ in range(2):
            assert await at.frontend.control("w1", Cancel(request_id="r", reason="client left"), Done) == Done()
        ended = await at.frontend.end_of("r")
        assert ended.reason == "cancelled"
        assert ended.usage.output_tokens == len(at.frontend.output["r"])
        assert await at.frontend.control("w1", Cancel(request_id="nobody", reason=""), Done) == Done()


async def test_a_request_past_its_deadline_ends_with_that_error(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, **SLOW, mock_speedup=1.0) as at:
        deadline_ms = int((time.time() + 0.3) * 1000)
        await at.frontend.send(
            "w1", at.frontend.generate("r", [1], mock=MockOutput(output="x" * 900), deadline_ms=deadline_ms)
        )
        ended = await at.frontend.end_of("r")
        assert ended.error is not None
        assert (ended.reason, ended.error.code) == ("error", ErrorCode.DEADLINE_EXCEEDED)


async def test_open_requests_are_limited(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, **SLOW, mock_speedup=1.0, max_requests=1) as at:
        await at.frontend.send("w1", at.frontend.generate("a", [1], mock=MockOutput(output="x" * 900)))
        with pytest.raises(RequestFailed) as caught:
            await at.frontend.send("w1", at.frontend.generate("b", [1], mock=MockOutput(output="x")))
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.OVERLOADED, True)


async def test_lost_frames_are_replayed_until_they_leave_the_ring(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, replay_frames=4) as at:
        await at.frontend.send("w1", at.frontend.generate("r", [1], mock=MockOutput(output="abcdefghij")))
        await at.frontend.end_of("r")
        kept = [frame for frame in at.frontend.frames if not frame.is_heartbeat][-4:]
        incarnation = at.service.incarnation
        ask = ReplaySteps(frontend_id="f1", incarnation=incarnation, first_seq=kept[0].seq, last_seq=kept[-1].seq)
        reply = await at.frontend.control("w1", ask, ReplayedSteps)
        assert [_frames.decode(data) for data in reply.frames] == kept
        for lost in (
            ReplaySteps(frontend_id="f1", incarnation=incarnation, first_seq=1, last_seq=2),
            ReplaySteps(frontend_id="f1", incarnation=incarnation - 1, first_seq=kept[0].seq, last_seq=kept[0].seq),
        ):
            with pytest.raises(RequestFailed) as caught:
                await at.frontend.control("w1", lost, ReplayedSteps)
            assert caught.value.code is ErrorCode.GONE


async def test_the_record_describes_the_model_and_its_bundle_can_be_fetched(
    nats_server: NatsServer, namespace: str
) -> None:
    async with stage(nats_server, namespace) as at:
        record = await _record(at.frontend)
        assert record.worker is not None
        card = record.worker.model
        assert (card.name, record.worker.engine, record.worker.total_blocks) == ("mock", "mock", 4096)
        assert card.eos_token_ids == (258, 256)
        bundle = unpack_bundle(await ObjectStore(at.frontend.bus).get(card.bundle), name=card.bundle)
        assert bundle == byte_level_bundle(context_length=131_072)
        assert pack_bundle(bundle)


async def test_load_is_reported_on_change_and_when_idle(nats_server: NatsServer, namespace: str) -> None:
    async with stage(
        nats_server, namespace, **SLOW, mock_speedup=1.0, load_idle_interval_s=0.1, load_min_interval_s=0.05
    ) as at:
        await eventually(lambda: len(at.frontend.loads) >= 2, what="idle reports")
        assert at.frontend.loads[-1].running == 0
        await at.frontend.send("w1", at.frontend.generate("r", [1] * 40, mock=MockOutput(output="x" * 900)))
        await eventually(lambda: at.frontend.loads[-1].request_ids == ("r",), what="a report with the request")
        await eventually(lambda: at.frontend.loads[-1].used_blocks > 0, what="blocks in use")
        await eventually(lambda: at.frontend.loads[-1].kv_seq > 0, what="the number of the last event")
        assert at.frontend.loads[-1].incarnation == at.service.incarnation
        await eventually(
            lambda: unpack_tokens(at.frontend.loads[-1].output_tokens)[0] > 0,
            what="a report of what the request has said",
        )
        await at.frontend.control("w1", Cancel(request_id="r", reason=""), Done)
        await eventually(lambda: at.frontend.loads[-1].request_ids == (), what="a report without it")


async def test_a_worker_that_is_idle_reports_to_a_router_that_joins(nats_server: NatsServer, namespace: str) -> None:
    idle = {"load_idle_interval_s": 1000.0, "load_min_interval_s": 0.01}
    async with stage(nats_server, namespace, **idle) as at:
        await eventually(lambda: at.frontend.loads, what="the first report")
        before = len(at.frontend.loads)
        settings = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="router-1", health_port=-1)
        async with host("router", settings, _start_frontend):
            await eventually(lambda: len(at.frontend.loads) > before, what="a report to the router")
        seqs = [report.seq for report in at.frontend.loads]
        assert seqs == list(range(1, len(seqs) + 1)), "reports are numbered"
        assert not at.frontend.loads[-1].ids_cut


async def test_block_events_and_snapshots_tell_the_same(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, kv_blocks=32, snapshot_chunk_blocks=3, snapshot_ttl_s=1.0) as at:
        events: list[KvEvents] = []
        subject = at.frontend.bus.subjects.kv_events("mock", "w1")

        def on_event(subject: str, data: bytes, headers: Any) -> None:
            events.append(decode_events(data, headers.get("Content-Type", "")))

        await at.frontend.bus.subscribe_bytes(subject, on_event)
        for number in range(6):
            await at.frontend.send(
                "w1", at.frontend.generate(f"r{number}", [number] * 150, mock=MockOutput(output="x"))
            )
            await at.frontend.end_of(f"r{number}")
        held: dict[bytes, bytes] = {}
        cursor: int | None = 0
        snapshot_id, kv_seq = "", 0
        while cursor is not None:
            chunk: BlockSnapshotChunk = await at.frontend.control(
                "w1", BlockSnapshot(cursor=cursor, snapshot_id=snapshot_id), BlockSnapshotChunk
            )
            assert (chunk.tier, chunk.model, chunk.instance_id) == ("g1", "mock", "w1")
            snapshot_id, cursor, kv_seq = chunk.snapshot_id, chunk.next_cursor, chunk.kv_seq
            for chain in chunk.chains:
                parent = chain.parent
                for key in unpack_keys(chain.keys):
                    assert parent == b"" or parent in held
                    held[key] = parent
                    parent = key
        await eventually(lambda: events and events[-1].last_seq == kv_seq, what="all events")
        seen: set[bytes] = set()
        next_seq = 1
        for batch in events:
            assert batch.first_seq == next_seq
            next_seq = batch.last_seq + 1
            for event in batch.events:
                match event:
                    case Stored(_, keys):
                        seen.update(unpack_keys(keys))
                    case Removed(keys):
                        seen.difference_update(unpack_keys(keys))
        assert seen == set(held)
        assert 0 < len(held) <= 32
        await eventually(lambda: at.metric("snapshots_held") == 0, what="the end of the snapshot")


async def test_the_requests_of_a_frontend_that_left_are_ended(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, **SLOW, mock_speedup=1.0) as at:
        other = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="f2", health_port=-1)
        async with host("frontend", other, _start_frontend) as second:
            assert isinstance(second.app, Frontend)
            await eventually(lambda: at.service.directory.get("f2"), what="the second frontend")
            await second.app.send("w1", second.app.generate("orphan", [1], mock=MockOutput(output="x" * 900)))
            await at.frontend.send("w1", at.frontend.generate("mine", [1], mock=MockOutput(output="x" * 900)))
        await eventually(lambda: at.metric("requests_ended_total", reason="cancelled") == 1, what="the orphan's end")
        assert at.metric("requests_open") == 1


async def test_draining_finishes_or_hands_back_what_runs(nats_server: NatsServer, namespace: str) -> None:
    common = CommonSettings(nats=nats_server.url, namespace=namespace, instance_id="f1", health_port=-1)
    settings = worker_settings(nats_server, namespace, **SLOW, mock_speedup=1.0, drain_timeout_s=0.5)
    async with host("frontend", common, _start_frontend) as hosted:
        frontend = hosted.app
        assert isinstance(frontend, Frontend)
        async with host("worker", settings, start):
            await frontend.send("w1", frontend.generate("long", [1], mock=MockOutput(output="x" * 900)))
            await frontend.send("w1", frontend.generate("short", [1], mock=MockOutput(output="x" * 4)))
            await eventually(lambda: frontend.output.get("long"), what="the first token")
            assert await frontend.control("w1", Drain(), Done) == Done()
            await eventually(
                lambda: (record := frontend.service.directory.get("w1")) is not None and record.draining,
                what="a draining record",
            )
            numbers = count()
            refusals: list[RequestFailed] = []

            async def is_refused() -> bool:
                """The record says so a moment before the worker acts on it."""
                try:
                    await frontend.send(
                        "w1", frontend.generate(f"late{next(numbers)}", [1], mock=MockOutput(output="x"))
                    )
                except RequestFailed as refusal:
                    refusals.append(refusal)
                return bool(refusals)

            refused: Callable[[], Any] = is_refused
            await eventually(refused, what="a refusal")
            assert (refusals[0].code, refusals[0].retryable) == (ErrorCode.DRAINING, True)
        short, long = await frontend.end_of("short"), await frontend.end_of("long")
        assert short.reason == "stop"
        assert long.error is not None
        assert (long.reason, long.error.code, long.error.retryable) == ("error", ErrorCode.DRAINING, True)
        assert long.usage.output_tokens == len(frontend.output["long"])
        await eventually(lambda: frontend.service.directory.get("w1") is None, what="the record's removal")


async def test_equal_prompts_give_equal_output_on_another_worker_after_a_migration(
    nats_server: NatsServer, namespace: str
) -> None:
    async with stage(nats_server, namespace) as at:
        second = worker_settings(nats_server, namespace, instance_id="w2", block_size=32)
        async with host("worker", second, start):
            stopping = Stopping(max_tokens=50, ignore_eos=True)
            await at.frontend.send("w1", at.frontend.generate("a", [1, 2, 3], stopping=stopping))
            await at.frontend.end_of("a")
            whole = at.frontend.output["a"]
            at.frontend.output["b"] = whole[:20]
            message = at.frontend.generate("b", [1, 2, 3, *whole[:20]], stopping=stopping, resumed=20)
            await at.frontend.send("w2", message)
            ended = await at.frontend.end_of("b")
            assert at.frontend.output["b"] == whole
            assert (ended.usage.prompt_tokens, ended.usage.output_tokens) == (3, 50)


async def test_a_script_is_played_turn_by_turn(nats_server: NatsServer, namespace: str, tmp_path: Path) -> None:
    script = tmp_path / "turns.jsonl"
    script.write_text('{"output": "one"}\n{"output": "two", "finish": "length"}\n')
    async with stage(nats_server, namespace, script=str(script)) as at:
        for request_id in ("a", "b"):
            await at.frontend.send("w1", at.frontend.generate(request_id, TOKENIZER.encode("go")))
            await at.frontend.end_of(request_id)
        assert (at.frontend.text("a"), at.frontend.text("b")) == ("one", "two")
        assert at.frontend.ended["b"].reason == "length"


async def test_heartbeats_break_a_long_silence(nats_server: NatsServer, namespace: str) -> None:
    async with stage(nats_server, namespace, mock_step_base_s=30.0, mock_speedup=1.0, heartbeat_s=0.05) as at:
        await at.frontend.send("w1", at.frontend.generate("r", [1], mock=MockOutput(output="x")))
        await eventually(lambda: sum(f.is_heartbeat for f in at.frontend.frames) >= 2, what="two heartbeats")
        async with asyncio.timeout(scaled(10)):
            await at.frontend.control("w1", Cancel(request_id="r", reason=""), Done)
