"""Which blocks go down to a lower tier, and in what order: bounded, oldest first, parents before their children."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from kvbus_blocks.retention import Directive


class BadPolicy(ValueError):
    """The text is no policy."""


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``batch_bytes`` and ``batch_share``: of a pool's slots, held while a batch is written; ``gather_s``: how long a batch
    gathers; ``retry_s``: pause before a tier that cannot be reached is tried again; ``queue_blocks``: waiting for one tier."""

    batch_bytes: int
    batch_share: float
    gather_s: float
    retry_s: float
    queue_blocks: int
    close_timeout_s: float = 10.0


class LoadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``chunk_bytes``: read at once, ``depth`` of them at the same time for one load; ``parallel``: loads that read at the same
    time; ``max_loads``: in all; ``deadline_s``: what a load has not brought up by then it leaves."""

    chunk_bytes: int
    depth: int
    parallel: int
    max_loads: int
    deadline_s: float


class EdgePolicy(msgspec.Struct, frozen=True):
    """What a tier takes: ``all`` blocks, those used ``least`` times (frequency), or those of a priority of ``least`` (pinned ones
    always). Ephemeral blocks never leave G2."""

    kind: str = "all"
    least: int = 0

    @classmethod
    def parse(cls, text: str) -> "EdgePolicy":
        """``all``, ``frequency:N`` or ``priority:N``. Raise BadPolicy."""
        kind, colon, number = text.partition(":")
        if text == "all":
            return cls()
        if kind in ("frequency", "priority") and colon and number.lstrip("-").isdecimal() and len(number) < 10:
            return cls(kind, int(number))
        raise BadPolicy(f"{text!r} is neither all, frequency:N nor priority:N")

    def admits(self, directive: Directive, uses: int) -> bool:
        if directive.kind == "ephemeral":
            return False
        if self.kind == "frequency":
            return uses >= self.least
        if self.kind == "priority":
            return directive.priority >= self.least or directive.kind == "pinned"
        return True


class WriteQueue:
    """Blocks of all pools that wait for one tier. What comes when it is full is dropped, and offered again when it is used."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.dropped = 0
        self._waiting: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, pool_id: str, keys: Sequence[bytes]) -> None:
        waiting = self._waiting.setdefault(pool_id, OrderedDict())
        for key in keys:
            if key in waiting:
                continue
            if self._count >= self.max_blocks:
                self.dropped += 1
                continue
            waiting[key] = None
            self._count += 1
        if not waiting:
            del self._waiting[pool_id]

    def put_back(self, pool_id: str, keys: Sequence[bytes]) -> None:
        """To the front: the tier could not be reached. What came meanwhile waits behind."""
        if not keys:
            return
        waiting = self._waiting.setdefault(pool_id, OrderedDict())
        for key in reversed(keys):
            self._count += key not in waiting
            waiting[key] = None
            waiting.move_to_end(key, last=False)
        self._waiting.move_to_end(pool_id, last=False)

    def take(self, blocks_of: Callable[[str], int]) -> tuple[str, list[bytes]] | None:
        """The oldest blocks of the pool whose turn it is, at most ``blocks_of(pool_id)``."""
        if not self._waiting:
            return None
        pool_id, waiting = next(iter(self._waiting.items()))
        keys = [waiting.popitem(last=False)[0] for _ in range(min(blocks_of(pool_id), len(waiting)))]
        self._count -= len(keys)
        self._waiting.move_to_end(pool_id)
        if not waiting:
            del self._waiting[pool_id]
        return pool_id, keys

    def discard(self, pool_id: str, keys: Sequence[bytes]) -> None:
        waiting = self._waiting.get(pool_id, OrderedDict())
        for key in keys:
            if key in waiting:
                del waiting[key]
                self._count -= 1
        if pool_id in self._waiting and not waiting:
            del self._waiting[pool_id]

    def forget(self, pool_id: str) -> int:
        """The pool is gone. How many of its blocks were waiting."""
        lost = len(self._waiting.pop(pool_id, ()))
        self._count -= lost
        self.dropped += lost
        return lost


class Pacer:
    """A rate limit that lets single batches through whole; the next one waits until they have been paid for."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def spent(self, size_bytes: int, now_s: float) -> None:
        if self._bytes_per_s > 0:
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._free_at_s - now_s)
