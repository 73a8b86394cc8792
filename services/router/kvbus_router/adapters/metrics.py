"""What the router decides, as metrics."""

from functools import partial

from kvbus_router.core.affinity import Forgotten
from kvbus_router.core.dispatcher import Dispatcher, Placed, Refused
from kvbus_router.core.policies import Outcome
from kvbus_router.core.policy_classes import PolicyClasses
from kvbus_router.core.state import Ending
from kvbus_runtime.metrics import Metrics

WHERE = ("g1", "g2", "g3", "g4", "remote", "inflight", "compute")


class RouterMetrics:
    """Gauges are read when the metrics page is, in another thread: only plain counts."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._ended: dict[Ending, int] = dict.fromkeys(Ending, 0)
        self._forgotten: dict[Forgotten, int] = dict.fromkeys(Forgotten, 0)
        self._placements = metrics.counter("placements", "requests placed", ("policy", "waited"))
        self._refusals = metrics.counter("refusals", "requests not placed", ("code",))
        self._endings = metrics.counter("reservations_ended", "reservations by why they ended", ("reason",))
        self._sessions = metrics.counter("session_placements", "placed requests of sessions", ("worker",))
        self._sessions_ended = metrics.counter("sessions_forgotten", "sessions by why they were forgotten", ("reason",))
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
        gauge("reservations", "placed requests").set_function(lambda: float(dispatcher.state.reservations))
        gauge("inflight_prefixes", "prefixes that are being computed").set_function(
            lambda: float(len(dispatcher.state.inflight))
        )
        gauge("inflight_key_bytes", "keys of prefixes that are being computed").set_function(
            lambda: float(dispatcher.state.inflight.key_bytes)
        )
        gauge("sessions", "sessions whose worker is remembered").set_function(lambda: float(len(dispatcher.affinity)))
        gauge("explained_requests", "placements that can be explained").set_function(
            lambda: float(len(dispatcher.decisions))
        )
        gauge("workers", "workers known").set_function(lambda: float(dispatcher.state.worker_count))

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

    def decision(self, applied: bool) -> None:
        self._decisions.labels("applied" if applied else "ignored").inc()

    def report(self, applied: bool) -> None:
        self._reports.labels("applied" if applied else "unknown_instance").inc()

    def endings(self) -> None:
        """Take over what has happened since the last call."""
        self._prefix_waits.inc(self._dispatcher.prefix_waits - self._prefix_waits_seen)
        self._prefix_waits_seen = self._dispatcher.prefix_waits
        for ending, count in self._dispatcher.state.endings.items():
            if count != self._ended[ending]:
                self._endings.labels(ending.value).inc(count - self._ended[ending])
                self._ended[ending] = count
        for reason, count in self._dispatcher.affinity.forgotten.items():
            if count != self._forgotten[reason]:
                self._sessions_ended.labels(reason.value).inc(count - self._forgotten[reason])
                self._forgotten[reason] = count
