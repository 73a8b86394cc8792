"""Metrics: one object per name, and never two meanings of it."""

import pytest

from kvbus_runtime.metrics import Metrics


def test_the_same_metric_asked_for_twice_is_one_object() -> None:
    metrics = Metrics("router")
    assert metrics.counter("moves", "moves", ("who",)) is metrics.counter("moves", "moves", ("who",))
    metrics.counter("moves", "moves", ("who",)).labels("a").inc()
    assert metrics.value("moves_total", {"who": "a"}) == 1


def test_a_name_that_is_taken_by_another_metric_is_refused() -> None:
    metrics = Metrics("router")
    metrics.gauge("size", "size of it")
    for other in (
        lambda: metrics.gauge("size", "size of something else"),
        lambda: metrics.gauge("size", "size of it", ("of",)),
        lambda: metrics.counter("size", "size of it"),
        lambda: metrics.histogram("size", "size of it"),
    ):
        with pytest.raises(ValueError, match="size is defined twice"):
            other()
