"""Who is there, and what workers say they have sent."""

from collections.abc import Callable

from kvbus_indexer.core.catalog import Catalog
from kvbus_runtime.discovery import Change
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord


class InstanceHandler:
    def __init__(self, catalog: Catalog, *, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._changed = changed

    def on_change(self, record: InstanceRecord, change: Change) -> None:
        if change == "left":
            self._catalog.left(record.instance_id)
        else:
            self._catalog.joined(record, self._clock())
        self._changed()

    def on_load(self, report: LoadReport) -> None:
        self._catalog.load_report(report, self._clock())
        self._changed()

    def on_caught_up(self) -> None:
        self._catalog.stream_caught_up(self._clock())
        self._changed()

    def on_stream_replaced(self) -> None:
        self._catalog.stream_replaced(self._clock())
        self._changed()

    def on_reconnect(self) -> None:
        self._catalog.reconnected(self._clock())
        self._changed()
