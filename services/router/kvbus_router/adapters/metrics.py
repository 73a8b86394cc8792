"""What the router decides, as metrics."""

from kvbus_router.core.dispatcher import Dispatcher, Placed, Refused
from kvbus_router.core.state import Ending
from kvbus_runtime.metrics import Metrics


class RouterMetrics:
    """Gauges are read when the metrics page is, in another thread: only plain counts."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._ended: dict[Ending, int] = dict.fromkeys(Ending, 0)
        self._placements = metrics.counter("placements", "requests placed", ("policy", "waited"))
        self._refusals = metrics.counter("refusals", "requests not placed", ("code",))
        self._endings = metrics.counter("reservations_ended", "reservations by why they ended", ("reason",))
        self._decisions = metrics.counter("replica_decisions", "placements of replicas", ("outcome",))
        self._reports = metrics.counter("load_reports", "load reports of workers", ("outcome",))
        self._queued = metrics.histogram("queued_seconds", "time in the queue of requests that were placed")
        self._ttft = metrics.histogram("predicted_ttft_seconds", "predicted time to the first token of placed requests")
        tokens = metrics.counter("prompt_tokens", "tokens of placed prompts by where they were found", ("where",))
        self._tokens = {where: tokens.labels(where) for where in ("g1", "onboard", "inflight", "compute")}
        gauge = metrics.gauge
        gauge("waiting_requests", "requests in the queue").set_function(lambda: float(dispatcher.waiting))
        gauge("reservations", "placed requests").set_function(lambda: float(dispatcher.state.reservations))
        gauge("inflight_prefixes", "prefixes that are being computed").set_function(
            lambda: float(len(dispatcher.state.inflight))
        )
        gauge("inflight_key_bytes", "keys of prefixes that are being computed").set_function(
            lambda: float(dispatcher.state.inflight.key_bytes)
        )
        gauge("workers", "workers known").set_function(lambda: float(dispatcher.state.worker_count))

    def placed(self, placed: Placed) -> None:
        placement, chosen = placed.placement, placed.chosen
        self._placements.labels(placement.policy, "yes" if placement.queued_s else "no").inc()
        self._queued.observe(placement.queued_s)
        self._ttft.observe(chosen.ttft_s)
        inflight = placed.decision.prompt_tokens - chosen.cached_tokens - chosen.onboard_tokens - chosen.uncached_tokens
        self._tokens["g1"].inc(chosen.cached_tokens)
        self._tokens["onboard"].inc(chosen.onboard_tokens)
        self._tokens["inflight"].inc(inflight)
        self._tokens["compute"].inc(chosen.uncached_tokens)

    def refused(self, refused: Refused) -> None:
        self._refusals.labels(refused.reply.code).inc()

    def decision(self, applied: bool) -> None:
        self._decisions.labels("applied" if applied else "ignored").inc()

    def report(self, applied: bool) -> None:
        self._reports.labels("applied" if applied else "unknown_instance").inc()

    def endings(self) -> None:
        """Take over what has ended since the last call."""
        for ending, count in self._dispatcher.state.endings.items():
            if count != self._ended[ending]:
                self._endings.labels(ending.value).inc(count - self._ended[ending])
                self._ended[ending] = count
