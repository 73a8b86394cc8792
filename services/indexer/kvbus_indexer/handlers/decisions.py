"""What routers decide and frontends see of it."""

from collections.abc import Callable

from kvbus_indexer.core.catalog import Catalog
from kvbus_runtime.metrics import Metrics
from kvbus_wire.router import Decision, Progress


class DecisionHandler:
    def __init__(self, catalog: Catalog, *, clock: Callable[[], float], metrics: Metrics) -> None:
        self._catalog = catalog
        self._clock = clock
        self._decisions = metrics.counter("decisions", "routing decisions heard", ("outcome",))

    def on_decision(self, decision: Decision) -> None:
        is_known = self._catalog.decided(decision, self._clock())
        self._decisions.labels("predicted" if is_known else "unknown_worker").inc()

    def on_progress(self, progress: Progress) -> None:
        self._catalog.progress(progress, self._clock())
