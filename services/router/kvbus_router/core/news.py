"""News about load that come too early, too late, twice or in the wrong order.

The bus keeps the order of one sender only, and promises nothing about two: a decision of a replica can be heard before the record
of its worker, after the end of its request, or behind a later decision on the same request.
"""

from collections import OrderedDict
from enum import StrEnum

from kvbus_wire.load import LoadReport
from kvbus_wire.router import Decision

REORDER_MS = 10_000
"""Messages overtake each other by less than that. What is older by more comes from a clock that has jumped."""


class Heard(StrEnum):
    """What became of a load report or of a replica's decision."""

    APPLIED = "applied"
    KNOWN = "known"
    EARLY = "early"
    OLD_INCARNATION = "old_incarnation"
    REORDERED = "reordered"
    ENDED = "ended"
    SUPERSEDED = "superseded"
    FULL = "full"


class Correction(StrEnum):
    """What a worker's report has put right.

    ``adopted``: a request that this router did not know of; ``moved``: one that was thought to be on another worker; ``outlived``:
    one that was said to be over some time ago; ``late``: one that had ended by the time the report came; ``untracked``: one that
    there is no room to keep account of, so it counts by the report only.
    """

    ADOPTED = "adopted"
    MOVED = "moved"
    OUTLIVED = "outlived"
    LATE = "late"
    UNTRACKED = "untracked"


def is_later(decided: tuple[int, str], known: tuple[int, str]) -> bool:
    """Whether a decision (unix milliseconds, router id) comes after another one: by these two, so that all replicas agree. One
    that claims to be much older is a newer one by a clock that was put right."""
    return decided >= known or known[0] - decided[0] > REORDER_MS


class EarlyNews:
    """News of workers, or of incarnations, that the directory does not name yet. Bounded: at the limit the oldest are forgotten,
    and the worker's next report makes up for them."""

    def __init__(self, max_news: int) -> None:
        self._max_news = max_news
        self._news: OrderedDict[tuple[str, str], tuple[LoadReport | Decision, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._news)

    def keep(self, news: LoadReport | Decision, now: float) -> None:
        """Of a worker's reports, and of a request's decisions, the last one is kept."""
        key = (news.instance_id, "") if isinstance(news, LoadReport) else (news.worker_id, news.request_id)
        self._news.pop(key, None)
        self._news[key] = (news, now)
        if len(self._news) > self._max_news:
            self._news.popitem(last=False)

    def take(self, worker_id: str) -> list[tuple[LoadReport | Decision, float]]:
        """Those of a worker, in the order in which they were heard, and when that was."""
        return [self._news.pop(key) for key in [key for key in self._news if key[0] == worker_id]]

    def forget(self, request_id: str) -> None:
        """The decisions on a request."""
        for key in [key for key in self._news if key[1] == request_id]:
            del self._news[key]


class EndedRequests:
    """Ids of the requests that ended last. An id is placed once more only by a router that knows better (`forget`)."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)

    def forget(self, request_id: str) -> None:
        self._ids.pop(request_id, None)
