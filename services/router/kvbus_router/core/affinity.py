"""Which worker served a session last.

    off    nothing is remembered
    soft   that worker's cost is lower by a bonus in seconds: it wins when it would take at most that much longer than another
    hard   only that worker, as long as it may take the request at all; the request waits when it has no room

The cache itself already draws a session to its worker. The bonus is for what the index does not know (yet). It is a constant, so
the most load that it can ever add to a worker is what that worker computes in that time.

Bounded: at the limit the session that was silent longest is forgotten, and each one after ``ttl_s`` without a placement. Replicas
tell each other: of two placements of a session the later one counts, with equal times that of the greater router id, in whatever
order they are heard. So all end up with the same worker, also when a clock has jumped (`is_later`).
"""

from collections import OrderedDict
from enum import StrEnum

import msgspec

from kvbus_router.core.news import is_later

MAX_SESSION_ID_CHARS = 256
"""Longer ids, which no API lets through, are not remembered."""

Key = tuple[str, str, str]


class Mode(StrEnum):
    OFF = "off"
    SOFT = "soft"
    HARD = "hard"


class Forgotten(StrEnum):
    """Why a session is not remembered any more."""

    LIMIT = "limit"
    EXPIRED = "expired"
    FINAL = "final"


class Bound(msgspec.Struct, frozen=True):
    """``decided_ms``: unix milliseconds; ``used_at``: monotonic seconds of this process."""

    worker_id: str
    decided_ms: int
    router_id: str
    used_at: float


def session_key(model: str, tenant: str, session_id: str) -> Key | None:
    """Sessions of different tenants never meet, even under one id. None: nothing to remember."""
    return (model, tenant, session_id) if 0 < len(session_id) <= MAX_SESSION_ID_CHARS else None


class SessionAffinity:
    """Times are monotonic seconds. Sessions are in the order of their last use."""

    def __init__(self, mode: Mode, max_sessions: int, ttl_s: float) -> None:
        self.mode = mode
        self.forgotten: dict[Forgotten, int] = dict.fromkeys(Forgotten, 0)
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[Key, Bound] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def worker_of(self, key: Key | None, now: float) -> str | None:
        self._expire(now)
        bound = self._sessions.get(key) if key is not None else None
        return None if bound is None else bound.worker_id

    def bind(self, key: Key | None, worker_id: str, *, decided_ms: int, router_id: str, now: float) -> None:
        """A request of the session was placed there, by this router or by a replica."""
        self._expire(now)
        if key is None or self.mode is Mode.OFF:
            return
        bound = self._sessions.get(key)
        if bound is not None and not is_later((decided_ms, router_id), (bound.decided_ms, bound.router_id)):
            self._sessions[key] = msgspec.structs.replace(bound, used_at=now)
        else:
            self._sessions[key] = Bound(worker_id, decided_ms, router_id, now)
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
            self.forgotten[Forgotten.LIMIT] += 1

    def end(self, key: Key | None) -> None:
        """Nothing follows in the session."""
        if key is not None and self._sessions.pop(key, None) is not None:
            self.forgotten[Forgotten.FINAL] += 1

    def _expire(self, now: float) -> None:
        while self._sessions:
            key, bound = next(iter(self._sessions.items()))
            if now - bound.used_at < self._ttl_s:
                return
            del self._sessions[key]
            self.forgotten[Forgotten.EXPIRED] += 1

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        if len(self._sessions) > self._max_sessions:
            raise AssertionError("too many sessions")
        used = [bound.used_at for bound in self._sessions.values()]
        if used != sorted(used):
            raise AssertionError("the sessions are out of order")
