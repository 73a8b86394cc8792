"""Prefixes that workers are computing right now, before any event tells of them.

A placed request's keys count from its placement until a moment after its first token, by when the events have reached the index. A
fan-out of equal prompts so finds the one worker that computes their prefix already.
"""

from kvbus_blocks.chains import common_blocks


class _Prefix:
    __slots__ = ("keys", "until", "worker_id")

    def __init__(self, worker_id: str, keys: bytes) -> None:
        self.worker_id = worker_id
        self.keys = keys
        self.until: float | None = None


class InFlightPrefixes:
    """By request id. Bounded by the bytes of the keys: at the limit the oldest are forgotten, which costs a guess."""

    def __init__(self, max_key_bytes: int, grace_s: float) -> None:
        self._max_key_bytes = max_key_bytes
        self._grace_s = grace_s
        self._prefixes: dict[str, _Prefix] = {}
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def key_bytes(self) -> int:
        return self._key_bytes

    def add(self, request_id: str, worker_id: str, keys: bytes) -> None:
        self.discard(request_id)
        if not keys or len(keys) > self._max_key_bytes:
            return
        self._prefixes[request_id] = _Prefix(worker_id, keys)
        self._key_bytes += len(keys)
        while self._key_bytes > self._max_key_bytes:
            self.discard(next(iter(self._prefixes)))

    def computed(self, request_id: str, now: float) -> None:
        """The request has its first token: its prefix exists, and the index will soon know."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None and prefix.until is None:
            prefix.until = now + self._grace_s

    def discard(self, request_id: str) -> None:
        prefix = self._prefixes.pop(request_id, None)
        if prefix is not None:
            self._key_bytes -= len(prefix.keys)

    def discard_uncomputed(self, request_id: str) -> None:
        """The request has ended; had it no first token, nothing can be said of its prefix."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None and prefix.until is None:
            self.discard(request_id)

    def drop_worker(self, worker_id: str) -> None:
        for request_id in [r for r, prefix in self._prefixes.items() if prefix.worker_id == worker_id]:
            self.discard(request_id)

    def depths(self, keys: bytes, now: float) -> dict[str, int]:
        """Per worker the most leading blocks of ``keys`` that it is computing."""
        depths: dict[str, int] = {}
        over = []
        for request_id, prefix in self._prefixes.items():
            if prefix.until is not None and prefix.until <= now:
                over.append(request_id)
                continue
            depth = common_blocks(keys, prefix.keys)
            if depth > depths.get(prefix.worker_id, 0):
                depths[prefix.worker_id] = depth
        for request_id in over:
            self.discard(request_id)
        return depths

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        if self._key_bytes != sum(len(prefix.keys) for prefix in self._prefixes.values()):
            raise AssertionError("the bytes are off")
        if self._key_bytes > self._max_key_bytes:
            raise AssertionError("over the limit")
