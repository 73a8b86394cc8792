"""Prefixes that workers are computing right now, before any event tells of them.

A placed request's keys count from its placement until a moment after its first token, by when the events have reached the index. A
fan-out of equal prompts so finds the one worker that computes their prefix already.

The prefixes lie in a radix tree: what many share is one node, so a question costs what the prompt has in branches, not what is in
flight.
"""

from collections import Counter, deque
from collections.abc import Iterator

from kvbus_blocks.chains import common_blocks
from kvbus_blocks.keys import KEY_BYTES


class _Node:
    """``run``: the keys from its parent to its end; ``workers``: how many prefixes that go through it each of them computes."""

    __slots__ = ("children", "parent", "run", "workers")

    def __init__(self, parent: "_Node | None", run: bytes, workers: dict[str, int]) -> None:
        self.parent = parent
        self.run = run
        self.workers = workers
        self.children: dict[bytes, _Node] = {}
        if parent is not None:
            parent.children[run[:KEY_BYTES]] = self

    def split(self, size: int) -> "_Node":
        """Put a new node in between, with the first ``size`` bytes of the run."""
        upper = _Node(self.parent, self.run[:size], dict(self.workers))
        self.parent, self.run = upper, self.run[size:]
        upper.children[self.run[:KEY_BYTES]] = self
        return upper


class _Prefix:
    __slots__ = ("end", "key_bytes", "until", "worker_id")

    def __init__(self, worker_id: str, key_bytes: int, end: _Node) -> None:
        self.worker_id = worker_id
        self.key_bytes = key_bytes
        self.end = end
        self.until: float | None = None

    def path(self) -> Iterator[_Node]:
        node = self.end
        while node.parent is not None:
            yield node
            node = node.parent


class InFlightPrefixes:
    """By request id. Bounded by the bytes of the keys: at the limit the oldest are forgotten, which costs a guess."""

    def __init__(self, max_key_bytes: int, grace_s: float) -> None:
        self._max_key_bytes = max_key_bytes
        self._grace_s = grace_s
        self._prefixes: dict[str, _Prefix] = {}
        self._computed: deque[tuple[float, str, _Prefix]] = deque()
        self._root = _Node(None, b"", {})
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
        self._prefixes[request_id] = _Prefix(worker_id, len(keys), self._insert(worker_id, keys))
        self._key_bytes += len(keys)
        while self._key_bytes > self._max_key_bytes:
            self.discard(next(iter(self._prefixes)))

    def _insert(self, worker_id: str, keys: bytes) -> _Node:
        node = self._root
        while keys:
            child = node.children.get(keys[:KEY_BYTES])
            if child is None:
                child = _Node(node, keys, {})
            else:
                same = common_blocks(keys, child.run) * KEY_BYTES
                if same < len(child.run):
                    child = child.split(same)
            child.workers[worker_id] = child.workers.get(worker_id, 0) + 1
            node, keys = child, keys[len(child.run) :]
        return node

    def computed(self, request_id: str, now: float) -> None:
        """The request has its first token: its prefix exists, and the index will soon know."""
        self._expire(now)
        prefix = self._prefixes.get(request_id)
        if prefix is not None and prefix.until is None:
            prefix.until = now + self._grace_s
            self._computed.append((prefix.until, request_id, prefix))

    def discard(self, request_id: str) -> None:
        prefix = self._prefixes.pop(request_id, None)
        if prefix is None:
            return
        self._key_bytes -= prefix.key_bytes
        for node in prefix.path():
            node.workers[prefix.worker_id] -= 1
            if not node.workers[prefix.worker_id]:
                del node.workers[prefix.worker_id]
            if not node.workers and node.parent is not None:
                del node.parent.children[node.run[:KEY_BYTES]]

    def discard_uncomputed(self, request_id: str) -> None:
        """The request has ended; had it no first token, nothing can be said of its prefix."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None and prefix.until is None:
            self.discard(request_id)

    def drop_worker(self, worker_id: str) -> None:
        for request_id in [r for r, prefix in self._prefixes.items() if prefix.worker_id == worker_id]:
            self.discard(request_id)

    def depths(self, keys: bytes, now: float, most: int = 64) -> dict[str, int]:
        """Per worker the most leading blocks of ``keys`` that it is computing: of more than ``most`` workers, those that have the
        most."""
        self._expire(now)
        path: list[tuple[_Node, int]] = []
        node, depth = self._root, 0
        while keys and (child := node.children.get(keys[:KEY_BYTES])) is not None:
            same = common_blocks(keys, child.run)
            depth += same
            path.append((child, depth))
            if same * KEY_BYTES < len(child.run):
                break
            node, keys = child, keys[len(child.run) :]
        depths: dict[str, int] = {}
        for node, depth in reversed(path):
            for worker_id in reversed(node.workers):
                if len(depths) == most:
                    return depths
                depths.setdefault(worker_id, depth)
        return depths

    def _expire(self, now: float) -> None:
        """Those that were computed first are over first."""
        while self._computed and self._computed[0][0] <= now:
            _, request_id, prefix = self._computed.popleft()
            if self._prefixes.get(request_id) is prefix:
                self.discard(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        if self._key_bytes != sum(prefix.key_bytes for prefix in self._prefixes.values()):
            raise AssertionError("the bytes are off")
        if self._key_bytes > self._max_key_bytes:
            raise AssertionError("over the limit")
        through: dict[_Node, Counter[str]] = {}
        for prefix in self._prefixes.values():
            for node in prefix.path():
                through.setdefault(node, Counter())[prefix.worker_id] += 1
        nodes, found = [self._root], 0
        while nodes:
            node = nodes.pop()
            for first, child in node.children.items():
                if child.parent is not node or child.run[:KEY_BYTES] != first or child.workers != through.get(child):
                    raise AssertionError("a node is wrong")
                nodes.append(child)
                found += 1
        if found != len(through):
            raise AssertionError("nodes are lost")
