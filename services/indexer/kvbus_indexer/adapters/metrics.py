"""The catalog's counts and sizes as metrics."""

from collections.abc import Callable
from functools import partial

from kvbus_blocks.index import IndexMemory, IndexSizes
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.fates import Blocks, Fate
from kvbus_indexer.core.instance import Phase
from kvbus_indexer.core.predictions import Ending
from kvbus_indexer.core.sources import Silence
from kvbus_runtime.metrics import Metrics


class CatalogMetrics:
    """Gauges are read when the metrics page is: in another thread, hence the copies of what may change meanwhile."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._events = metrics.counter("events", "KV events by what became of them", ("kind", "fate"))
        self._blocks = metrics.counter("blocks_changed", "blocks by what became of them", ("what",))
        self._predictions = metrics.counter("predictions", "predictions that ended, by why", ("why",))

    def events(self, fate: Fate, kind: str, count: int) -> None:
        self._events.labels(kind, fate.value).inc(count)

    def blocks(self, what: Blocks, count: int) -> None:
        if count:
            self._blocks.labels(what.value).inc(count)

    def prediction_ended(self, why: Ending) -> None:
        self._predictions.labels(why.value).inc()

    def watch(self, catalog: Catalog) -> None:
        def sizes(field: str) -> float:
            indexes: list[IndexSizes] = [index.sizes() for index in list(catalog.content.indexes.values())]
            return float(sum(getattr(size, field) for size in indexes))

        def memory(field: str) -> float:
            indexes: list[IndexMemory] = [index.memory() for index in list(catalog.content.indexes.values())]
            return float(sum(getattr(memory, field) for memory in indexes))

        gauge = self._metrics.gauge
        gauge("entries", "blocks, once per instance and tier that holds them").set_function(
            lambda: float(catalog.content.entries)
        )
        gauge("blocks", "distinct blocks").set_function(lambda: sizes("blocks"))
        gauge("owner_sets", "distinct sets of owners that blocks have").set_function(lambda: memory("owner_sets"))
        gauge("index_bytes", "memory of the indexes, roughly").set_function(lambda: memory("size_bytes"))
        gauge("bytes_per_block", "memory of the indexes per distinct block").set_function(
            lambda: memory("size_bytes") / max(1.0, sizes("blocks"))
        )
        gauge("orphan_entries", "entries out of reach, since their prefix is not held").set_function(
            lambda: sizes("orphans")
        )
        gauge("instances", "instances that are followed").set_function(lambda: float(catalog.instances))
        gauge("instances_in_repair", "instances whose content is not known to be right").set_function(
            lambda: float(catalog.instances - catalog.repairs.in_phase(Phase.LIVE))
        )
        gauge("instances_partial", "instances of which a part is left out for want of room").set_function(
            lambda: float(catalog.partial_instances)
        )
        without_events = gauge("workers_without_events", "workers that work and are not heard, by why", ("why",))
        for why in Silence:
            without_events.labels(why.value).set_function(partial(self._silent, catalog, why))
        gauge("predicted_entries", "blocks that workers are predicted to hold, once per worker").set_function(
            lambda: float(catalog.predictions.entries)
        )
        gauge("predicted_keys", "keys of all predictions, what max_predicted_keys limits").set_function(
            lambda: float(catalog.predictions.keys)
        )

    def _silent(self, catalog: Catalog, why: Silence) -> float:
        return float(list(catalog.silent_workers(self._clock()).values()).count(why))
