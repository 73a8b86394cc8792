"""Asks the indexer, and lives without it."""

import asyncio
from typing import Any

from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_wire.indexer import IndexQuery, IndexReply, Match


class IndexClient:
    """Never fails: without an answer nothing is known of any cache. After some failures in a row the indexer is left alone for a
    moment, so that a hanging one does not add its timeout to every request."""

    def __init__(
        self, bus: Bus, *, timeout_s: float, failures: int, pause_s: float, metrics: Metrics, log: Any
    ) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._max_failures = failures
        self._pause_s = pause_s
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._failures = 0
        self._paused_until = 0.0
        self._queries = metrics.counter("index_queries", "questions to the indexer", ("outcome",))
        self._seconds = metrics.histogram("index_query_seconds", "time to an answer of the indexer")

    async def query(self, model: str, keys: bytes) -> tuple[Match, ...]:
        if not keys:
            return ()
        started = self._clock()
        if started < self._paused_until:
            self._queries.labels("paused").inc()
            return ()
        try:
            reply: IndexReply = await self._bus.request(
                self._bus.subjects.index_query(model),
                IndexQuery(model=model, keys=keys),
                IndexReply,
                timeout_s=self._timeout_s,
            )
        except RequestFailed as failure:
            self._queries.labels(failure.code).inc()
            if failure.retryable:
                self._failed(failure)
            return ()
        self._failures = 0
        self._queries.labels("ok").inc()
        self._seconds.observe(self._clock() - started)
        return reply.matches

    def _failed(self, failure: RequestFailed) -> None:
        self._failures += 1
        if self._failures == self._max_failures:
            self._log.warning("index_unavailable", reason=str(failure), pause_s=self._pause_s)
        if self._failures >= self._max_failures:
            self._paused_until = self._clock() + self._pause_s
