"""Metrics of one service, on a registry of its own (several services may run in one test process)."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Makes prometheus objects named ``kvbus_<service>_<name>``. Asking again for a name returns the same object."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"kvbus_{service}_"
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:  # noqa: A002
        """Name it without ``_total``; the exposition adds it."""
        if name not in self._counters:
            self._counters[name] = Counter(self._prefix + name, help, labels, registry=self.registry)
        return self._counters[name]

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:  # noqa: A002
        if name not in self._gauges:
            self._gauges[name] = Gauge(self._prefix + name, help, labels, registry=self.registry)
        return self._gauges[name]

    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS,
    ) -> Histogram:
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                self._prefix + name, help, labels, registry=self.registry, buckets=buckets
            )
        return self._histograms[name]

    def value(self, name: str, labels: dict[str, str] | None = None) -> float:
        """Current value of a sample (``<name>_total`` for counters), 0 when there is none; for tests and status pages."""
        sample_name = self._prefix + name
        for family in self.registry.restricted_registry([sample_name]).collect():
            for sample in family.samples:
                if sample.name == sample_name and sample.labels == (labels or {}):
                    return float(sample.value)
        return 0.0

    def exposition(self) -> bytes:
        """The text format; takes milliseconds, so handlers call it in a thread."""
        return generate_latest(self.registry)
