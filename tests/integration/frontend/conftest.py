"""A frontend between a real nats-server and a worker and router that the test plays, with the real messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.app import Frontend, start_frontend
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.service import RunningService, Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.responses import parse_events
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import ModelBundle, bundle_name, byte_level_bundle, pack_bundle
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, StepFrame, TokenLogprob, Usage
from kvbus_wire.indexer import IndexQuery, IndexReply
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks
from kvbus_wire.message import encode
from kvbus_wire.packing import TOKEN_BYTES, pack_tokens, unpack_tokens
from kvbus_wire.records import KvbmRecord, ModelCard, WorkerRecord
from kvbus_wire.router import Placement, Progress, RouteRequest
from kvbus_wire.worker import (
    Accepted,
    Cancel,
    Done,
    Generate,
    NeedTokens,
    Prefetch,
    Prefetched,
    ReplayedSteps,
    ReplaySteps,
)

BLOCK_SIZE = 4
CONTEXT_LENGTH = 512


class Output:
    """What the test lets a worker say to one request."""

    def __init__(self, worker: "FakeWorker", message: Generate) -> None:
        self._worker = worker
        self.message = message
        self._sent = message.resumed

    async def started(self, cached: int = 0) -> None:
        await self._worker.send(self.message, started=(Started(self.message.request_id, cached),))

    async def say(self, text: str | bytes, *, logprobs: bool = False) -> None:
        """One frame with these bytes as tokens."""
        tokens = list(text.encode() if isinstance(text, str) else text)
        entries = tuple(TokenLogprob(t, -0.5, ((t, -0.5), (63, -1.5))) for t in tokens) if logprobs else ()
        delta = Delta(self.message.request_id, self._sent, pack_tokens(tokens), entries)
        self._sent += len(tokens)
        await self._worker.send(self.message, deltas=(delta,))

    async def end(
        self, reason: str = "stop", *, error: ErrorReply | None = None, token: int | None = None, unpinned: int = 0
    ) -> None:
        usage = Usage(
            prompt_tokens=self._worker.prompt_tokens(self.message),
            output_tokens=self._sent,
            unpinned_tokens=unpinned,
        )
        ended = Ended(request_id=self.message.request_id, reason=reason, usage=usage, stop_token_id=token, error=error)
        await self._worker.send(self.message, ended=(ended,))


Play = Callable[[Output], Awaitable[None]]


async def hello(output: Output) -> None:
    await output.started()
    await output.say("Hello")
    await output.say(" world")
    await output.end()


class FakeWorker:
    """Accepts everything and plays ``play``; ``answer`` may refuse instead."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.requests: list[Generate] = []
        self.cancels: list[Cancel] = []
        self.prefetches: list[Prefetch] = []
        self.drops: list[DropBlocks] = []
        self.bring: Callable[[Prefetch], Prefetched | NeedTokens] = lambda m: Prefetched(
            request_id=m.request_id, cached_tokens=m.prefix_tokens + len(m.tokens) // TOKEN_BYTES, onboarded_tokens=8
        )
        self.play: Play = hello
        self.answer: Callable[[Generate], Accepted | NeedTokens] = lambda m: Accepted(
            request_id=m.request_id, incarnation=service.incarnation
        )
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self._sent: dict[str, list[StepFrame]] = {}
        self._cancelled = asyncio.Event()

    @property
    def dropped(self) -> list[bytes]:
        """Keys, in the order in which they were dropped."""
        keys = b"".join(message.keys for message in self.drops)
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    @staticmethod
    def prompt_tokens(message: Generate) -> int:
        return message.prefix_tokens + len(message.tokens) // TOKEN_BYTES - message.resumed

    async def start(self, card: ModelCard) -> None:
        bus, name = self.service.bus, self.service.instance_id
        await bus.serve(bus.subjects.generate(name), [Generate, Prefetch], self._generate)
        await bus.serve(bus.subjects.control(name), [Cancel, ReplaySteps, DropBlocks], self._control)
        await self.register(card)

    async def register(self, card: ModelCard) -> None:
        record = WorkerRecord(
            model=card, engine="mock", total_blocks=100, max_num_seqs=8, max_batched_tokens=512,
            prefill_tokens_per_s=1e4, decode_step_s=0.01,
        )  # fmt: skip
        await self.service.register(worker=record)

    async def _generate(self, message: Generate | Prefetch, _context: Any) -> Accepted | NeedTokens | Prefetched:
        if isinstance(message, Prefetch):
            self.prefetches.append(message)
            return self.bring(message)
        self.requests.append(message)
        self.asked.set()
        await self.may_answer.wait()
        reply = self.answer(message)
        if isinstance(reply, Accepted):
            self.service.spawn(self._run(message), name="play")
        return reply

    async def _run(self, message: Generate) -> None:
        await self.play(Output(self, message))

    async def _control(
        self, message: Cancel | ReplaySteps | DropBlocks, _context: Any
    ) -> Done | ReplayedSteps | DroppedBlocks:
        if isinstance(message, DropBlocks):
            self.drops.append(message)
            return DroppedBlocks(blocks={"g1": len(message.keys) // KEY_BYTES})
        if isinstance(message, Cancel):
            self.cancels.append(message)
            self._cancelled.set()
            return Done()
        sent = self._sent.get(message.frontend_id, [])
        return ReplayedSteps(frames=tuple(encode(frame) for frame in sent[message.first_seq - 1 : message.last_seq]))

    async def cancelled(self) -> None:
        """Wait for a Cancel."""
        await self._cancelled.wait()

    async def send(self, message: Generate, **parts: Any) -> None:
        sent = self._sent.setdefault(message.frontend_id, [])
        frame = StepFrame(
            worker_id=self.service.instance_id, incarnation=self.service.incarnation, seq=len(sent) + 1, **parts
        )
        sent.append(frame)
        await self.service.bus.publish(self.service.bus.subjects.steps(message.frontend_id), frame)

    async def drain(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class FakeRouter:
    """Places on the first worker that is not excluded; ``answer`` may do otherwise. ``gate``: while it is closed, requests wait."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.requests: list[RouteRequest] = []
        self.progress: list[Progress] = []
        self.cached_tokens = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[RouteRequest], Placement] = self.place

    async def start(self) -> None:
        bus = self.service.bus
        await bus.serve(bus.subjects.route("*"), [RouteRequest], self._route, queue="routers")
        await bus.subscribe(bus.subjects.progress("*"), [Progress], self.progress.append)
        await self.service.register()

    async def _route(self, message: RouteRequest, _context: Any) -> Placement:
        self.requests.append(message)
        await self.gate.wait()
        return self.answer(message)

    def place(self, message: RouteRequest) -> Placement:
        workers = [
            record
            for record in self.service.directory.instances("worker")
            if record.instance_id not in message.excluded
            and (not message.allowed or record.instance_id in message.allowed)
            and message.pinned in (None, record.instance_id)
        ]
        if not workers:
            raise RequestFailed.of(ErrorCode.NO_WORKERS, "no worker is left")
        return Placement(
            request_id=message.request_id,
            worker_id=workers[0].instance_id,
            incarnation=workers[0].incarnation,
            cached_tokens=self.cached_tokens,
            onboard_tokens=0,
            policy="first",
        )

    def phases(self, request_id: str) -> list[str]:
        return [p.phase for p in self.progress if p.request_id == request_id]

    async def drain(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class FakeKvbm:
    """Drops what it is told to, as from three tiers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.drops: list[DropBlocks] = []

    async def start(self) -> None:
        bus = self.service.bus
        await bus.serve(bus.subjects.control(self.service.instance_id), [DropBlocks], self._drop)
        await self.service.register(kvbm=KvbmRecord(g2_bytes=1))

    async def _drop(self, message: DropBlocks, _context: Any) -> DroppedBlocks:
        self.drops.append(message)
        count = len(message.keys) // KEY_BYTES
        return DroppedBlocks(blocks={"g2": count, "g3": count, "g4": 1})

    async def drain(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class FakeIndexer:
    """Answers all queries by ``reply``."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.queries: list[IndexQuery] = []
        self.reply = IndexReply()

    async def start(self) -> None:
        bus = self.service.bus
        await bus.serve(bus.subjects.index_query("*"), [IndexQuery], self._answer, queue="indexers")
        await self.service.register()

    async def _answer(self, message: IndexQuery, _context: Any) -> IndexReply:
        self.queries.append(message)
        return self.reply

    async def drain(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class Cluster:
    """Starts what a test asks for, and stops it at the end."""

    def __init__(self, nats_url: str, namespace: str, stack: AsyncExitStack) -> None:
        self.common: dict[str, Any] = {"nats": nats_url, "namespace": namespace, "health_port": -1}
        self.stack = stack
        self.session: aiohttp.ClientSession
        self.url = ""
        self.router: FakeRouter
        self.worker: FakeWorker
        self.frontend: RunningService[FrontendSettings]

    async def add_worker(self, instance: str = "w1", bundle: ModelBundle | None = None, **card: Any) -> FakeWorker:
        fields = {
            "name": "m", "fingerprint": "f" * 32, "block_size": BLOCK_SIZE, "context_length": CONTEXT_LENGTH,
            "kv_layout": "l", "created_s": 1,
        }  # fmt: skip
        data = pack_bundle(bundle or byte_level_bundle())

        async def start(service: Service, _settings: CommonSettings) -> FakeWorker:
            worker = FakeWorker(service)
            await ObjectStore(service.bus).put(bundle_name(data), data)
            self.card = ModelCard(**{**fields, "bundle": bundle_name(data), **card})
            await worker.start(self.card)
            return worker

        running = await self.stack.enter_async_context(
            host("worker", CommonSettings(**self.common, instance_id=instance), start)
        )
        assert isinstance(running.app, FakeWorker)
        return running.app

    async def add_loading_worker(self, instance: str, model: str) -> Service:
        async def start(service: Service, _settings: CommonSettings) -> FakeWorker:
            await service.register(loading=model)
            return FakeWorker(service)

        settings = CommonSettings(**self.common, instance_id=instance)
        return (await self.stack.enter_async_context(host("worker", settings, start))).service

    async def add_router(self) -> FakeRouter:
        async def start(service: Service, _settings: CommonSettings) -> FakeRouter:
            router = FakeRouter(service)
            await router.start()
            return router

        running = await self.stack.enter_async_context(
            host("router", CommonSettings(**self.common, instance_id="router"), start)
        )
        assert isinstance(running.app, FakeRouter)
        return running.app

    async def add_kvbm(self, instance: str = "k1") -> FakeKvbm:
        async def start(service: Service, _settings: CommonSettings) -> FakeKvbm:
            kvbm = FakeKvbm(service)
            await kvbm.start()
            return kvbm

        running = await self.stack.enter_async_context(
            host("kvbm", CommonSettings(**self.common, instance_id=instance), start)
        )
        assert isinstance(running.app, FakeKvbm)
        return running.app

    async def add_indexer(self) -> FakeIndexer:
        async def start(service: Service, _settings: CommonSettings) -> FakeIndexer:
            indexer = FakeIndexer(service)
            await indexer.start()
            return indexer

        running = await self.stack.enter_async_context(
            host("indexer", CommonSettings(**self.common, instance_id="i1"), start)
        )
        assert isinstance(running.app, FakeIndexer)
        return running.app

    async def add_frontend(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "http_port": 0,
            "instance_id": "front",
            "retry_pause_s": 0.01,
            "drain_timeout_s": 1.0,
        }
        self.frontend = await self.stack.enter_async_context(
            host("frontend", FrontendSettings(**self.common, **{**defaults, **settings}), start_frontend)
        )
        assert isinstance(self.frontend.app, Frontend)
        self.url = self.frontend.app.url
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession(self.url))

    async def start(
        self, *, bundle: ModelBundle | None = None, card: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.router = await self.add_router()
        self.worker = await self.add_worker(bundle=bundle, **(card or {}))
        await self.add_frontend(**settings)
        await eventually(lambda: self.frontend.service.health.ready, what="a ready frontend")

    @staticmethod
    def plays(
        text: str, *, size: int = 5, finish: str = "stop", error: ErrorReply | None = None, logprobs: bool = False
    ) -> Play:
        """A worker that says this text in steps of ``size`` tokens, which are bytes."""
        data = text.encode()

        async def play(output: Output) -> None:
            await output.started(cached=4)
            for start in range(0, len(data), size):
                await output.say(data[start : start + size], logprobs=logprobs)
            await output.end("error" if error is not None else finish, error=error)

        return play

    def says(self, text: str, **how: Any) -> None:
        """From now on; ``how``: as in `plays`."""
        self.worker.play = self.plays(text, **how)

    # talking to the frontend

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def kept_waiting(
        self, path: str, body: Any, *, waits: str, sign: bytes, text: str = "late", **options: Any
    ) -> bytes:
        """The bytes of a stream that hears nothing until three signs of life have come. ``waits``: "for a place" or "for its first
        token"."""
        go_on = asyncio.Event()

        async def play(output: Output) -> None:
            await go_on.wait()
            await output.started()
            await output.say(text)
            await output.end()

        self.worker.play = play
        if waits == "for a place":
            self.router.gate.clear()
        data = b""
        async with self.session.post(path, json={**body, "stream": True}, **options) as response:
            async for chunk in response.content.iter_any():
                data += chunk
                if data.count(sign) >= 3:
                    self.router.gate.set()
                    go_on.set()
        return data

    async def chat(self, content: Any = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", self.body(content, **fields))

    async def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; "[DONE]" and comments as they are."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return self.parse(await response.text())

    async def chat_stream(self, content: Any = "hi", **fields: Any) -> list[Any]:
        return await self.stream("/v1/chat/completions", self.body(content, **fields))

    async def respond(self, content: Any = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/responses", {"model": "m", "input": content, **fields})

    async def respond_stream(self, content: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
        """The events of a response, with the sentinel checked and left out."""
        body = {"model": "m", "input": content, "stream": True, **fields}
        async with self.session.post("/v1/responses", json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
            data = await response.read()
        assert data.endswith(b"data: [DONE]\n\n")
        return parse_events(data)

    def prompts(self) -> list[str]:
        """What the worker was sent, as text; markers are left out."""
        return [
            bytes(token for token in unpack_tokens(message.tokens) if token < 256).decode()
            for message in self.worker.requests
        ]

    @staticmethod
    def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}

    @staticmethod
    def parse(text: str) -> list[Any]:
        events: list[Any] = []
        for block in text.split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
            elif block:
                events.append(block)
        return events

    @staticmethod
    def text(events: list[Any], index: int = 0) -> str:
        """What one choice of a stream says."""
        choices = [c for e in events if isinstance(e, dict) for c in e.get("choices", ()) if c["index"] == index]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    def metric(self, name: str, **labels: str) -> float:
        return self.frontend.service.metrics.value(name, labels)


@pytest.fixture
async def cluster(nats_server: NatsServer, namespace: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(nats_server.url, namespace, stack)


@pytest.fixture
async def own_bus_cluster(namespace: str) -> AsyncIterator[tuple[NatsServer, Cluster]]:
    """For tests that disturb the bus."""
    with NatsServer() as server:
        async with AsyncExitStack() as stack:
            yield server, Cluster(server.url, namespace, stack)
