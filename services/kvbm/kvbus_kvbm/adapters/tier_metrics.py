"""The lower tiers as metrics, read when somebody asks for them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.adapters.tiers import Edge, Tiers
from kvbus_runtime.metrics import Metrics

_TIER_COUNTERS = {
    "hits": "blocks that a lower tier was asked for and gave",
    "misses": "blocks that a lower tier was asked for and did not have",
    "stored": "blocks stored in a lower tier",
    "refused": "blocks that a lower tier did not take",
    "corrupt": "blocks of a lower tier whose checksum did not hold",
    "failures": "operations of a lower tier that failed",
    "read_bytes": "bytes read from a lower tier",
    "written_bytes": "bytes written to a lower tier",
    "read_s": "seconds that reading from a lower tier took",
    "write_s": "seconds that writing to a lower tier took",
}
_EDGE_COUNTERS = {
    "written": "blocks written through",
    "missed": "blocks that had left G2 before they could be written through",
}
_LOAD_COUNTERS = {
    "blocks": "blocks brought up into G2",
    "bytes": "bytes brought up into G2",
    "seconds": "seconds that bringing up took",
    "no_room": "times that nothing in G2 could give way to what was to be brought up",
    "late": "loads that reached their deadline",
    "failed": "loads that an error ended",
    "refused": "loads refused since too many were under way",
}


class TierMetrics:
    """A collector: the state lies where it is kept, and is only read here."""

    def __init__(self, metrics: Metrics, tiers: Tiers, loads: Loads) -> None:
        self._tiers = tiers
        self._loads = loads
        self._prefix = f"kvbus_{metrics.service}_"
        metrics.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are only known by collecting, which needs no start."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=("tier",))
            for edge in self._tiers.edges:
                gauge.add_metric((edge.tier.name,), value(edge))
            yield gauge
        for field, text in _TIER_COUNTERS.items():
            yield self._counter(f"tier_{field}", text, _of_tier(field))
        for field, text in _EDGE_COUNTERS.items():
            yield self._counter(f"write_through_{field}", text, _of_edge(field))
        yield self._counter(
            "write_through_dropped", "blocks not written through: the queue was full", lambda edge: edge.queue.dropped
        )
        evictions = CounterMetricFamily(
            self._prefix + "tier_evictions", "blocks that gave way in a lower tier", labels=("tier", "class")
        )
        for edge in self._tiers.edges:
            for kind, count in edge.tier.counters.evictions.items():
                evictions.add_metric((edge.tier.name, kind), count)
        yield evictions
        for field, text in _LOAD_COUNTERS.items():
            loaded = CounterMetricFamily(self._prefix + f"load_{field}", text, labels=("tier",))
            for name, counters in self._loads.counters.items():
                loaded.add_metric((name,), getattr(counters, field))
            yield loaded
        loads = GaugeMetricFamily(self._prefix + "loads", "chains that are being brought up")
        loads.add_metric((), len(self._loads))
        yield loads

    def _counter(self, name: str, text: str, value: Callable[[Edge], Any]) -> CounterMetricFamily:
        counter = CounterMetricFamily(self._prefix + name, text, labels=("tier",))
        for edge in self._tiers.edges:
            counter.add_metric((edge.tier.name,), float(value(edge)))
        return counter


def _of_tier(field: str) -> Callable[[Edge], Any]:
    return lambda edge: getattr(edge.tier.counters, field)


def _of_edge(field: str) -> Callable[[Edge], Any]:
    return lambda edge: getattr(edge.counters, field)


_GAUGES: tuple[tuple[str, str, Callable[[Edge], float]], ...] = (
    ("tier_blocks", "blocks in a lower tier", lambda edge: edge.tier.usage().blocks),
    ("tier_bytes", "bytes used in a lower tier", lambda edge: edge.tier.usage().used_bytes),
    ("tier_capacity_bytes", "size of a lower tier", lambda edge: edge.tier.usage().capacity_bytes),
    ("tier_available", "1: the tier is used, 0: it is bypassed", lambda edge: edge.tier.usage().available),
    ("write_through_waiting", "blocks that wait for a lower tier", lambda edge: len(edge.queue)),
)
