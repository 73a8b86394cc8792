"""A frontend reduced to what tests of workers need: it sends tokens and collects step frames."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.timing import scaled
from kvbus_wire.frontend import Ended, StepFrame, Usage
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks
from kvbus_wire.packing import pack_keys, pack_tokens, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.worker import Accepted, Cancel, Done, Generate, Prefetch, Prefetched, RemotePrefill


class Answer:
    """``cached`` prompt tokens were not computed; ``onboarded`` of them came from a lower tier."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.cached = 0
        self.onboarded = 0
        self.prefill_worker = ""
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    @property
    def usage(self) -> Usage:
        """When it has ended."""
        return self.ended.result().usage


class Asker:
    """Asks workers directly. Made by `asking`."""

    def __init__(self, service: Service, model: str) -> None:
        self.service = service
        self._model = model
        self._answers: dict[str, Answer] = {}

    async def begin(self) -> None:
        subject = self.service.bus.subjects.steps(self.service.instance_id)
        await self.service.bus.subscribe(subject, [StepFrame], self._on_frame)

    def _on_frame(self, frame: StepFrame) -> None:
        for started in frame.started:
            answer = self._answers[started.request_id]
            answer.cached, answer.onboarded = started.cached_tokens, started.onboarded_tokens
            answer.prefill_worker = started.prefill_worker_id
        for delta in frame.deltas:
            self._answers[delta.request_id].tokens += unpack_tokens(delta.tokens)
        for ended in frame.ended:
            self._answers[ended.request_id].ended.set_result(ended)

    async def ask(
        self, worker_id: str, tokens: Sequence[int], max_tokens: int = 24, *, prefill: str = "", **fields: Any
    ) -> Answer:
        """The greedy answer of exactly ``max_tokens`` tokens. ``prefill``: the worker that computes the prompt. ``fields``: more of
        the message."""
        answer = await self.send(worker_id, tokens, max_tokens, prefill=prefill, **fields)
        ended = await asyncio.wait_for(answer.ended, scaled(60))
        assert ended.reason == "length", ended
        return answer

    async def send(
        self,
        worker_id: str,
        tokens: Sequence[int],
        max_tokens: int = 24,
        *,
        prefill: str = "",
        within_s: float = 60.0,
        **fields: Any,
    ) -> Answer:
        """The same, without waiting for its end. ``within_s``: the deadline."""
        request_id = secrets.token_hex(4)
        answer = self._answers[request_id] = Answer(request_id)
        generate = Generate(
            request_id=request_id,
            model=self._model,
            frontend_id=self.service.instance_id,
            tokens=pack_tokens(tokens),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
            deadline_ms=int((time.time() + within_s) * 1000),
            **fields,
            prefill=RemotePrefill(worker_id=prefill, incarnation=0, tokens=0) if prefill else None,
        )
        await self.service.bus.request(self.service.bus.subjects.generate(worker_id), generate, Accepted, timeout_s=20)
        return answer

    async def cancel(self, worker_id: str, answer: Answer) -> None:
        subject = self.service.bus.subjects.control(worker_id)
        await self.service.bus.request(subject, Cancel(request_id=answer.request_id, reason="test"), Done, timeout_s=20)

    async def prefetch(
        self,
        worker_id: str,
        tokens: Sequence[int],
        *,
        within_s: float = 20.0,
        reply: type[Any] = Prefetched,
        **fields: Any,
    ) -> Any:
        """Bring the blocks of a prompt into G1, with as much time as it takes: a request would wait no longer than computing."""
        message = Prefetch(
            request_id="prefetch",
            model=self._model,
            tokens=pack_tokens(tokens),
            deadline_ms=int((time.time() + scaled(within_s)) * 1000),
            **fields,
        )
        subject = self.service.bus.subjects.generate(worker_id)
        return await self.service.bus.request(subject, message, reply, timeout_s=scaled(30))

    async def drop(self, worker_id: str, keys: Sequence[bytes], *, model: str = "") -> dict[str, int]:
        """Free blocks; how many, by tier."""
        message = DropBlocks(model=model or self._model, keys=pack_keys(keys))
        subject = self.service.bus.subjects.control(worker_id)
        dropped: DroppedBlocks = await self.service.bus.request(subject, message, DroppedBlocks, timeout_s=scaled(10))
        return dropped.blocks

    async def drain(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass


@asynccontextmanager
async def asking(settings: CommonSettings, model: str) -> AsyncIterator[Asker]:
    async def begin(service: Service, settings: CommonSettings) -> Asker:
        asker = Asker(service, model)
        await asker.begin()
        return asker

    async with host("frontend", settings, begin) as running:
        assert isinstance(running.app, Asker)
        yield running.app
