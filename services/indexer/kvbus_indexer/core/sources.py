"""Which workers have no event source, so that it can be said loudly: a worker in no answer is not seen to be missing.

That a worker is not heard means nothing while it has nothing to say. What speaks against it are its own load reports:

    declared   its record says that its engine has no events
    silent     it has held blocks for some time, and has emitted no event at all
    unheard    it says that it has emitted events since it is followed, and for some time none has arrived
"""

from enum import StrEnum

from kvbus_wire.load import LoadReport


class Silence(StrEnum):
    """Why nothing is heard of a worker."""

    DECLARED = "declared"
    SILENT = "silent"
    UNHEARD = "unheard"


class EventSource:
    """What a worker's load reports tell about its events. Times are monotonic seconds. ``declared``: that it has none."""

    def __init__(self, *, declared: bool) -> None:
        self._declared = declared
        self._busy_since: float | None = None
        self._first_seq: int | None = None
        self._emits_since: float | None = None
        self._last_seq = 0

    def report(self, report: LoadReport, now: float) -> None:
        self._last_seq = report.kv_seq
        if report.used_blocks and self._busy_since is None:
            self._busy_since = now
        if self._first_seq is None:
            self._first_seq = report.kv_seq
        elif report.kv_seq > self._first_seq and self._emits_since is None:
            self._emits_since = now

    def silence(self, *, heard: bool, grace_s: float, now: float) -> Silence | None:
        """None: it was heard, or may have had nothing to say."""
        if heard:
            return None
        if self._declared:
            return Silence.DECLARED
        if self._last_seq:
            is_unheard = self._emits_since is not None and now >= self._emits_since + grace_s
            return Silence.UNHEARD if is_unheard else None
        is_silent = self._busy_since is not None and now >= self._busy_since + grace_s
        return Silence.SILENT if is_silent else None
