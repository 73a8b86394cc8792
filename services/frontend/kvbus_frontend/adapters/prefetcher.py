"""Brings the blocks of prompts back into G1 before they are asked for."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from kvbus_frontend.core.dispatch import Job, known_blocks, prefetch_message, route_request
from kvbus_frontend.core.failures import api_error
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.errors import ApiError
from kvbus_runtime.bus import Bus, RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_wire.frontend import SessionPrefetched
from kvbus_wire.router import Placement, Progress
from kvbus_wire.worker import NeedTokens, Prefetched

Allowed = Callable[[str], tuple[str, ...]]
"""The workers that serve a model by now."""


class Prefetcher:
    def __init__(self, bus: Bus, settings: FrontendSettings, allowed: Allowed, metrics: Metrics) -> None:
        self._bus = bus
        self._settings = settings
        self._allowed = allowed
        self._running = 0
        self._outcomes = metrics.counter(
            "prefetches", "prompts brought back, by what became of it", ("cause", "outcome")
        )
        self._tokens = metrics.counter("prefetched_tokens", "tokens whose blocks were brought back into G1")
        metrics.gauge("prefetches_running", "prompts that are being brought back").set_function(
            lambda: float(self._running)
        )

    async def run(self, job: Job, cause: str, *, deadline_s: float) -> SessionPrefetched:
        """``job``: its prompt is to be brought back, by ``deadline_s`` (unix). Raise ApiError."""
        if self._running >= self._settings.max_prefetches:
            self._outcomes.labels(cause, "too_many").inc()
            raise ApiError(429, "Too many prompts are being brought back.", code="rate_limit_exceeded")
        self._running += 1
        outcome = "failed"
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.time())):
                done = await self._run(job, int(deadline_s * 1000))
            outcome = "brought" if done.onboarded_tokens else "nothing_to_bring"
            self._tokens.inc(done.onboarded_tokens)
            return done
        except TimeoutError as late:
            outcome = "late"
            raise ApiError(504, "The blocks were not there in time.", code="deadline_exceeded") from late
        except RequestFailed as failure:
            raise api_error(failure.reply) from failure
        finally:
            self._running -= 1
            self._outcomes.labels(cause, outcome).inc()

    async def _run(self, job: Job, deadline_ms: int) -> SessionPrefetched:
        job = msgspec.structs.replace(
            job,
            request_id=f"{job.request_id}-prefetch-{time.time_ns():x}",
            deadline_ms=deadline_ms,
            allowed=self._allowed(job.model),
            speculative=True,
            explain=False,
            stopping=msgspec.structs.replace(job.stopping, max_tokens=1),
        )
        placement: Placement = await self._bus.request(
            self._bus.subjects.route(job.model),
            route_request(job, job.prompt, ()),
            Placement,
            timeout_s=self._settings.route_timeout_s,
        )
        try:
            found = await self._send(job, placement.worker_id, known_blocks(placement, job.prompt))
            if isinstance(found, NeedTokens):
                found = await self._send(job, placement.worker_id, 0)
        finally:
            over = Progress(request_id=job.request_id, model=job.model, phase="finished")
            await self._bus.publish(self._bus.subjects.progress(job.model), over)
        if isinstance(found, NeedTokens):
            raise ApiError(503, "The worker asks for tokens that it has got.", code="unavailable")
        return SessionPrefetched(
            model=job.model,
            worker_id=placement.worker_id,
            prompt_tokens=job.prompt.count,
            cached_tokens=found.cached_tokens,
            onboarded_tokens=found.onboarded_tokens,
        )

    async def _send(self, job: Job, worker_id: str, prefix_blocks: int) -> Prefetched | NeedTokens:
        reply: Prefetched | NeedTokens = await self._bus.request(
            self._bus.subjects.generate(worker_id),
            prefetch_message(job, prefix_blocks=prefix_blocks),
            Prefetched,
            NeedTokens,
            timeout_s=max(0.1, job.deadline_ms / 1000 - time.time()),
            in_parts=True,
        )
        return reply
