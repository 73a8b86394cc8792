"""The catalog's counts and sizes as metrics."""

from kvbus_blocks.index import IndexSizes
from kvbus_indexer.core.catalog import Blocks, Catalog, Fate
from kvbus_indexer.core.instance import Phase
from kvbus_runtime.metrics import Metrics


class CatalogMetrics:
    """Gauges are read when the metrics page is: in another thread, hence the copies of what may change meanwhile."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._events = metrics.counter("events", "KV events by what became of them", ("fate",))
        self._blocks = metrics.counter("blocks_changed", "blocks by what became of them", ("what",))

    def count(self, what: Fate | Blocks, count: int) -> None:
        if count:
            (self._events if isinstance(what, Fate) else self._blocks).labels(what.value).inc(count)

    def watch(self, catalog: Catalog) -> None:
        def sizes(field: str) -> float:
            indexes: list[IndexSizes] = [index.sizes() for index in list(catalog.content.indexes.values())]
            return float(sum(getattr(size, field) for size in indexes))

        gauge = self._metrics.gauge
        gauge("entries", "blocks, once per instance and tier that holds them").set_function(
            lambda: float(catalog.content.entries)
        )
        gauge("blocks", "distinct blocks").set_function(lambda: sizes("blocks"))
        gauge("orphan_entries", "entries out of reach, since their prefix is not held").set_function(
            lambda: sizes("orphans")
        )
        gauge("instances", "instances that are followed").set_function(lambda: float(catalog.instances))
        gauge("instances_in_repair", "instances whose content is not known to be right").set_function(
            lambda: float(catalog.instances - catalog.in_phase(Phase.LIVE))
        )
        gauge("instances_partial", "instances of which a part is left out for want of room").set_function(
            lambda: float(catalog.partial_instances)
        )
        gauge("workers_without_events", "workers of which no event was ever applied").set_function(
            lambda: float(len(catalog.workers_without_events()))
        )
