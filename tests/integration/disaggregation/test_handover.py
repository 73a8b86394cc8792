"""Engines that move blocks themselves: the workers carry what they say to each other, and look into none of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvbus_testkit.nats import NatsServer
from kvbus_testkit.pairs import Pair, prompt, workers_for
from kvbus_testkit.timing import scaled
from kvbus_wire.errors import ErrorCode
from kvbus_worker.adapters.engines import create_engine
from kvbus_worker.app import start
from kvbus_worker.engines.base import EngineError, EngineInfo, EngineRequest, HandsOver, StepOutput, StepSink
from kvbus_worker.engines.mock import MockEngine
from kvbus_worker.settings import WorkerSettings

HEARD: dict[str, list[EngineRequest]] = {}


class Handing(MockEngine):
    """Says "for <what it was told>" when a prefill is done. ``name``: whose it is."""

    handover_early = False
    refuses = False
    name = ""

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, handover="test", block_bytes=0)

    async def start(self, sink: StepSink) -> None:
        def with_payloads(output: StepOutput) -> None:
            done = [
                (ended.request_id, b"params for " + request.handover)
                for ended in output.ended
                for request in HEARD[self.name]
                if request.request_id == ended.request_id and request.prefill_only
            ]
            sink(msgspec.structs.replace(output, handovers=tuple(done)))

        await super().start(with_payloads)

    def submit(self, request: EngineRequest) -> None:
        HEARD[self.name].append(request)
        super().submit(request)

    def prefill_payload(self, request: EngineRequest) -> bytes:
        if self.refuses:
            raise EngineError(ErrorCode.UNAVAILABLE, "no room", retryable=True)
        return f"room of {len(request.tokens)}".encode()


@pytest.fixture
async def handing(nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    HEARD.clear()

    def make(settings: Any, model: Any) -> Any:
        engine = create_engine(settings, model)
        engine.__class__ = Handing
        assert isinstance(engine, Handing)
        engine.name = settings.instance_id
        HEARD[engine.name] = []
        return engine

    monkeypatch.setattr("kvbus_worker.app.create_engine", make)
    fields = {"engine": "mock", "mock_speedup": float("inf"), "kv_blocks": 1024}
    async with workers_for(nats_server, namespace, "mock", WorkerSettings, start, **fields) as pair:
        await pair.join("p", "prefill")
        await pair.join("d", "decode")
        yield pair


async def test_what_the_prefill_engine_says_reaches_the_decode_engine(handing: Pair) -> None:
    assert isinstance(handing.app("d")._engine, HandsOver)
    answer = await handing.asker.ask("d", prompt(20), prefill="p")
    there, here = HEARD["p"], HEARD["d"]
    assert [(request.prefill_only, request.handover) for request in there] == [(True, b"room of 325")]
    assert [(request.prefill_only, request.handover) for request in here] == [(False, b"params for room of 325")]
    assert answer.prefill_worker == "p"
    await handing.nothing_is_left()


async def test_engines_that_run_at_the_same_time_both_know_the_room(
    handing: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handing, "handover_early", True)
    answers = await asyncio.gather(*(handing.asker.ask("d", prompt(20, more=m), prefill="p") for m in (1, 2)))
    assert sorted(request.handover for request in HEARD["d"]) == [b"room of 321", b"room of 322"]
    assert sorted(request.handover for request in HEARD["p"]) == [b"room of 321", b"room of 322"]
    assert [answer.prefill_worker for answer in answers] == ["p", "p"]
    await handing.nothing_is_left()


async def test_without_a_hand_over_the_decode_engine_computes_the_prompt(
    handing: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handing, "refuses", True)
    answer = await asyncio.wait_for(handing.asker.ask("d", prompt(20), prefill="p"), scaled(30))
    assert (answer.prefill_worker, HEARD["d"][0].handover, HEARD["p"]) == ("", b"", [])
    await handing.nothing_is_left()


async def test_another_kind_of_hand_over_is_refused(handing: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    other = handing.app("p")._engine
    assert isinstance(other, Handing)

    class OtherKind(Handing):
        @property
        def info(self) -> EngineInfo:
            return msgspec.structs.replace(super().info, handover="other")

    other.__class__ = OtherKind
    answer = await handing.asker.ask("d", prompt(20), prefill="p")
    assert (answer.prefill_worker, HEARD["p"]) == ("", [])
    assert handing.metric("d", "remote_prefill_pulls", outcome="unsupported") == 1
