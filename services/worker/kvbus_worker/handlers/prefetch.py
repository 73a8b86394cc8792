"""Prefetch: a prompt's blocks come back into G1 before its request does. Nothing is computed."""

import time

from kvbus_wire.message import Message
from kvbus_wire.worker import NeedTokens, Prefetch, Prefetched
from kvbus_worker.adapters.kvbm import Kvbm
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.admission import ModelLimits, PrefixGone, resolve
from kvbus_worker.core.retention import block_runs
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import Engine
from kvbus_worker.engines.said import Said


class PrefetchHandler:
    """At most ``parallel`` bring blocks at once; more are answered with what is there."""

    def __init__(
        self, engine: Engine, store: TokenStore, limits: ModelLimits, kvbm: Kvbm | None, *, parallel: int,
        metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._store = store
        self._limits = limits
        self._kvbm = kvbm
        self._parallel = parallel
        self._metrics = metrics
        self._running = 0

    async def __call__(self, message: Prefetch) -> Message:
        """Raise EngineError."""
        try:
            prompt = resolve(message, self._limits, self._store)
        except PrefixGone:
            self._metrics.prefetches.labels("no_prefix").inc()
            return NeedTokens(request_id=message.request_id)
        runs = block_runs(
            message.retention,
            len(prompt.tokens),
            self._limits.block_size,
            tenant=message.tenant,
            now_s=time.monotonic(),
            limit=self._limits.max_retention_ranges,
        )
        onboarded = 0
        within_s = message.deadline_ms / 1000 - time.time()
        if self._engine.cached_blocks(prompt.keys) == len(prompt.keys):
            outcome = "present"
        elif self._kvbm is None:
            outcome = "nothing_came"
        elif self._running >= self._parallel or within_s <= 0:
            outcome = "skipped"
        else:
            self._running += 1
            try:
                onboarded = await self._kvbm.prefetch(prompt.keys, prompt.packed, within_s, Said(runs))
            finally:
                self._running -= 1
            outcome = "brought" if onboarded else "nothing_came"
        # They are as recent as if they had been used, so that they are still there when they are.
        cached = await self._engine.touch(prompt.keys, runs)
        self._metrics.prefetches.labels(outcome).inc()
        self._metrics.prefetched.inc(onboarded)
        return Prefetched(
            request_id=message.request_id,
            cached_tokens=cached * self._limits.block_size,
            onboarded_tokens=onboarded,
        )
