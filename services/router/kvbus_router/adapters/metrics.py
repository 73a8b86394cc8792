"""What the router decides, as metrics."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

from prometheus_client import Counter

from kvbus_router.core.dispatcher import Dispatcher, Placed, Refused
from kvbus_router.core.news import Heard
from kvbus_router.core.policies import Outcome
from kvbus_router.core.policy_classes import PolicyClasses
from kvbus_runtime.metrics import Metrics

K = TypeVar("K", bound=StrEnum)

WHERE = ("g1", "g2", "g3", "g4", "remote", "inflight", "compute")


class Tally(Generic[K]):
    """A counter that follows counts which the core keeps by kind."""

    def __init__(self, counter: Counter, counts: Mapping[K, int]) -> None:
        self._counter = counter
        self._counts = counts
        self._seen: dict[K, int] = {}

    def take_over(self) -> None:
        for kind, count in self._counts.items():
            if count != self._seen.get(kind, 0):
                self._counter.labels(kind.value).inc(count - self._seen.get(kind, 0))
                self._seen[kind] = count


class RouterMetrics:
    """Gauges are read when the metrics page is, in another thread: only plain counts."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        state = dispatcher.state
        self._placements = metrics.counter("placements", "requests placed", ("policy", "waited"))
        self._refusals = metrics.counter("refusals", "requests not placed", ("code",))
        self._tallies: list[Tally[Any]] = [
            Tally(metrics.counter("reservations_ended", "reservations by why they ended", ("reason",)), state.endings),
            Tally(
                metrics.counter("load_corrections", "what load reports have put right, by request", ("kind",)),
                state.corrections,
            ),
            Tally(
                metrics.counter("sessions_forgotten", "sessions by why they were forgotten", ("reason",)),
                dispatcher.affinity.forgotten,
            ),
        ]
        self._sessions = metrics.counter("session_placements", "placed requests of sessions", ("worker",))
        self._decisions = metrics.counter("replica_decisions", "placements of replicas", ("outcome",))
        self._reports = metrics.counter("load_reports", "load reports of workers", ("outcome",))
        self._queued = metrics.histogram("queued_seconds", "time in the queue of requests that were placed")
        self._ttft = metrics.histogram("predicted_ttft_seconds", "predicted time to the first token of placed requests")
        self._observed = metrics.histogram("observed_ttft_seconds", "from a placement to the news of its first token")
        self._missed = metrics.histogram(
            "ttft_error_seconds", "by how much the prediction was wrong, in either direction"
        )
        self._prefix_waits = metrics.counter(
            "prefix_waits", "requests that waited for a worker that computes their prefix"
        )
        self._prefix_waits_seen = 0
        self._class_waiting = metrics.gauge(
            "class_waiting_requests", "requests in the queue by policy class", ("policy_class",)
        )
        self._class_running = metrics.gauge(
            "class_placed_requests", "placed requests by policy class", ("policy_class",)
        )
        tokens = metrics.counter("prompt_tokens", "tokens of placed prompts by where they were found", ("where",))
        self._tokens = {where: tokens.labels(where) for where in WHERE}
        gauge = metrics.gauge
        gauge("waiting_requests", "requests in the queue").set_function(lambda: float(dispatcher.waiting))
        gauge("reservations", "placed requests").set_function(lambda: float(state.reservations))
        gauge("inflight_prefixes", "prefixes that are being computed").set_function(lambda: float(len(state.inflight)))
        gauge("inflight_key_bytes", "keys of prefixes that are being computed").set_function(
            lambda: float(state.inflight.key_bytes)
        )
        gauge("sessions", "sessions whose worker is remembered").set_function(lambda: float(len(dispatcher.affinity)))
        gauge("explained_requests", "placements that can be explained").set_function(
            lambda: float(len(dispatcher.decisions))
        )
        gauge("replicas", "routers that share the requests, this one included").set_function(
            lambda: float(dispatcher.routers)
        )
        gauge("early_news", "messages about workers that the directory does not name yet").set_function(
            lambda: float(len(state.early))
        )
        gauge("oldest_load_report_seconds", "how long the worker that is silent longest has been").set_function(
            lambda: max((clock() - since for since in state.silent_since()), default=0.0)
        )
        gauge("workers", "workers known").set_function(lambda: float(state.worker_count))

    def placed(self, placed: Placed) -> None:
        placement, chosen = placed.placement, placed.chosen
        self._placements.labels(placement.policy, "yes" if placement.queued_s else "no").inc()
        self._queued.observe(placement.queued_s)
        self._ttft.observe(chosen.ttft_s)
        self._tokens["g1"].inc(chosen.cached_tokens)
        for part in chosen.onboard:
            self._tokens[part.source].inc(part.tokens)
        self._tokens["inflight"].inc(chosen.inflight_tokens)
        self._tokens["compute"].inc(chosen.uncached_tokens)

        if placed.session is not None:
            self._sessions.labels(placed.session).inc()

    def first_token(self, outcome: Outcome) -> None:
        self._observed.observe(outcome.ttft_s)
        self._missed.observe(abs(outcome.ttft_s - outcome.chosen.ttft_s))

    def classes(self, classes: PolicyClasses) -> None:
        """Of these the page tells how many requests wait and are placed."""
        self._class_waiting.clear()
        self._class_running.clear()
        for name in (found.name for found in classes.classes):
            self._class_waiting.labels(name).set_function(partial(self._dispatcher.room.of_class, name))
            self._class_running.labels(name).set_function(partial(self._dispatcher.state.shares.of_class, name))

    def refused(self, refused: Refused) -> None:
        self._refusals.labels(refused.reply.code).inc()

    def decision(self, heard: Heard) -> None:
        self._decisions.labels(heard.value).inc()

    def report(self, heard: Heard) -> None:
        self._reports.labels(heard.value).inc()

    def take_over(self) -> None:
        """What has happened since the last call."""
        self._prefix_waits.inc(self._dispatcher.prefix_waits - self._prefix_waits_seen)
        self._prefix_waits_seen = self._dispatcher.prefix_waits
        for tally in self._tallies:
            tally.take_over()
