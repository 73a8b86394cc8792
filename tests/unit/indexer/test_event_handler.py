"""Messages of the stream that cannot be read."""

from unittest.mock import MagicMock

from kvbus_indexer.handlers.events import EventHandler
from kvbus_runtime.metrics import Metrics


def test_a_flood_of_them_is_counted_and_is_one_line_in_the_log() -> None:
    catalog, metrics, log = MagicMock(), Metrics("indexer"), MagicMock()
    handler = EventHandler(catalog, clock=lambda: 0.0, changed=lambda: None, metrics=metrics, log=log)
    for stream_seq in range(1, 1001):
        handler("kv.m.w", b"\xc1 garbage", {}, stream_seq)
    assert metrics.value("event_batches_total", {"outcome": "bad"}) == 1000
    assert log.warning.call_count == 1
    assert catalog.delivered.call_count == 1000
    assert not catalog.apply.called
