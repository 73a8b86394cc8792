"""Prompts that workers compute for others, as routers have placed them and as the workers' reports list them.

A report counts what it lists; what it does not list yet comes on top, for as long as the request has time to arrive.
"""

from collections.abc import Iterable

import msgspec


class RemotePrefillLoad(msgspec.Struct):
    """``listed``: the worker's last report names it."""

    request_id: str
    worker_id: str
    tokens: int
    placed_at: float
    listed: bool = False


class RemotePrefills:
    """By request; a request has at most one. Whoever owns it bounds the requests."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._by_request: dict[str, RemotePrefillLoad] = {}
        self._by_worker: dict[str, dict[str, RemotePrefillLoad]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request_id: str, worker_id: str, tokens: int, now: float) -> None:
        self.drop(request_id)
        load = RemotePrefillLoad(request_id, worker_id, tokens, now)
        self._by_request[request_id] = load
        self._by_worker.setdefault(worker_id, {})[request_id] = load

    def drop(self, request_id: str) -> None:
        """It is computed, or nobody waits for it any more."""
        load = self._by_request.pop(request_id, None)
        if load is None:
            return
        of_worker = self._by_worker[load.worker_id]
        del of_worker[request_id]
        if not of_worker:
            del self._by_worker[load.worker_id]

    def drop_worker(self, worker_id: str) -> None:
        for request_id in list(self._by_worker.get(worker_id, ())):
            self.drop(request_id)

    def reported(self, worker_id: str, named: Iterable[str], now: float) -> None:
        """A report of the worker names these. Of the others those are over that it named before, or that had time to arrive."""
        names = set(named)
        for load in list(self._by_worker.get(worker_id, {}).values()):
            if load.request_id in names:
                load.listed = True
            elif load.listed or now - load.placed_at > self._grace_s:
                self.drop(load.request_id)

    def on_top(self, worker_id: str) -> tuple[int, int]:
        """Requests, and prompt tokens of them, that the worker's report does not count yet."""
        loads = [load for load in self._by_worker.get(worker_id, {}).values() if not load.listed]
        return len(loads), sum(load.tokens for load in loads)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        held = {request_id: load for loads in self._by_worker.values() for request_id, load in loads.items()}
        if held != self._by_request or not all(self._by_worker.values()):
            raise AssertionError("a remote prefill is on two workers, or on none")
