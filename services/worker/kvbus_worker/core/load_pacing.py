"""When to tell the routers about the load: soon after a change, but not often; now and then when nothing changes."""


class LoadPacing:
    def __init__(self, *, min_interval_s: float, idle_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._idle_interval_s = idle_interval_s
        self._changed = True
        self._last = float("-inf")

    def changed(self) -> None:
        self._changed = True

    @property
    def pending(self) -> bool:
        """A change has not been told yet."""
        return self._changed

    def published(self, now: float) -> None:
        self._changed = False
        self._last = now

    def wait_s(self, now: float) -> float:
        """How long from ``now`` until the next report is due."""
        interval = self._min_interval_s if self._changed else self._idle_interval_s
        return max(self._last + interval - now, 0.0)
