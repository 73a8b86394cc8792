"""The stream of KV events."""

from collections.abc import Callable, Mapping
from typing import Any

from kvbus_indexer.core.catalog import Catalog
from kvbus_runtime.log import Seldom
from kvbus_runtime.metrics import Metrics
from kvbus_wire.kv_events import decode_events
from kvbus_wire.message import DecodeFailed


class EventHandler:
    """Applies each batch. One that cannot be read is a gap, which the next one shows."""

    def __init__(
        self, catalog: Catalog, *, clock: Callable[[], float], changed: Callable[[], None], metrics: Metrics, log: Any
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._changed = changed
        self._log = log
        self._bad_lines = Seldom()
        self._batches = metrics.counter("event_batches", "messages of the KV stream", ("outcome",))

    def __call__(self, subject: str, data: bytes, headers: Mapping[str, str], stream_seq: int) -> None:
        now = self._clock()
        self._catalog.delivered(stream_seq, now)
        try:
            batch = decode_events(data, headers.get("Content-Type", ""))
        except DecodeFailed as problem:
            self._batches.labels("bad").inc()
            if (held_back := self._bad_lines.turn()) is not None:
                self._log.warning(
                    "bad_event_batch",
                    subject=subject,
                    stream_seq=stream_seq,
                    error=str(problem),
                    held_back=held_back,
                )
            return
        self._catalog.apply(batch, now, stream_seq)
        self._batches.labels("ok").inc()
        self._changed()
