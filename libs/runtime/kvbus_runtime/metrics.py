"""Metrics of one service, on a registry of its own (several services may run in one test process)."""

from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

M = TypeVar("M", Counter, Gauge, Histogram)

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Makes prometheus objects named ``kvbus_<service>_<name>``.

    Asking again for the same metric returns the same object; raise ValueError when the name is taken by a different one.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self._prefix = f"kvbus_{service}_"
        self._made: dict[str, tuple[tuple[object, ...], object]] = {}
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:  # noqa: A002
        """Name it without ``_total``; the exposition adds it."""
        return self._get(Counter, name, help, labels)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:  # noqa: A002
        return self._get(Gauge, name, help, labels)

    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS,
    ) -> Histogram:
        return self._get(Histogram, name, help, labels, buckets=tuple(buckets))

    def _get(self, kind: type[M], name: str, text: str, labels: Sequence[str], **options: Any) -> M:
        asked = (kind, text, tuple(labels), *options.items())
        if name not in self._made:
            self._made[name] = asked, kind(self._prefix + name, text, labels, registry=self.registry, **options)
        made_as, metric = self._made[name]
        if made_as != asked or not isinstance(metric, kind):
            raise ValueError(f"the metric {name} is defined twice: {made_as} and {asked}")
        return metric

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
