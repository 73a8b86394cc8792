"""Asks the indexers, and lives without them."""

import asyncio
from collections.abc import Iterable
from random import Random
from typing import Any

from kvbus_router.core.replicas import Replicas
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_wire.indexer import IndexQuery, IndexReply, Match

WHOEVER = ""
"""In place of a name: whichever indexer takes the question, while the directory names none."""


class IndexClient:
    """Never fails: without an answer nothing is known of any cache.

    Indexers are asked by name, and not as a group: the bus goes on sending a part of a group's questions to a member whose host is
    cut off, until it notices. After some failures in a row an indexer is left alone for a moment, so that a hanging one adds its
    timeout to few requests. If nobody serves the one that was asked, another is asked within the same timeout.
    """

    def __init__(
        self, bus: Bus, *, timeout_s: float, failures: int, pause_s: float, rng: Random, metrics: Metrics, log: Any
    ) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._replicas = Replicas(failures, pause_s, rng)
        self.set_indexers(())
        self._queries = metrics.counter("index_queries", "questions to an indexer", ("outcome",))
        self._seconds = metrics.histogram("index_query_seconds", "time to an answer of an indexer")

    def set_indexers(self, indexer_ids: Iterable[str]) -> None:
        """Those that the directory names now."""
        self._replicas.set(list(indexer_ids) or [WHOEVER])

    async def query(self, model: str, keys: bytes) -> tuple[Match, ...]:
        if not keys:
            return ()
        started = now = self._clock()
        deadline, tried = started + self._timeout_s, set[str]()
        while now < deadline and (indexer_id := self._replicas.pick(now, tried)) is not None:
            tried.add(indexer_id)
            try:
                reply = await self._ask(indexer_id, IndexQuery(model=model, keys=keys), deadline - now)
            except RequestFailed as failure:
                now = self._clock()
                self._queries.labels(failure.code).inc()
                if not failure.retryable:
                    return ()
                if self._replicas.failed(indexer_id, now):
                    self._log.warning(
                        "index_unavailable", indexer=indexer_id or None, reason=str(failure), pause_s=self._pause_s
                    )
                continue
            self._replicas.answered(indexer_id)
            self._queries.labels("ok").inc()
            self._seconds.observe(self._clock() - started)
            return reply.matches
        if not tried:
            self._queries.labels("paused").inc()
        return ()

    async def _ask(self, indexer_id: str, query: IndexQuery, timeout_s: float) -> IndexReply:
        subjects = self._bus.subjects
        subject = subjects.index_query(query.model) if indexer_id == WHOEVER else subjects.indexer_query(indexer_id)
        reply: IndexReply = await self._bus.request(subject, query, IndexReply, timeout_s=timeout_s)
        return reply
