"""News of the cluster: who is there, how loaded, what was placed elsewhere, how requests move on."""

from collections.abc import Callable, Iterable

from kvbus_router.adapters.metrics import RouterMetrics
from kvbus_router.core.dispatcher import Dispatcher, Settled
from kvbus_runtime.discovery import Change
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.router import Decision, Progress


class ClusterHandler:
    """Each kind of news may make room for somebody who waits: ``settle`` takes what became of them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        router_id: str,
        *,
        clock: Callable[[], float],
        settle: Callable[[Iterable[Settled]], None],
        changed: Callable[[], None],
        metrics: RouterMetrics,
    ) -> None:
        self._dispatcher = dispatcher
        self._router_id = router_id
        self._clock = clock
        self._settle = settle
        self._changed = changed
        self._metrics = metrics

    def on_change(self, record: InstanceRecord, change: Change) -> None:
        if change == "left":
            self._dispatcher.state.left(record)
        else:
            self._settle(self._dispatcher.joined(record, self._clock()))
        self._pump()

    def on_load(self, report: LoadReport) -> None:
        heard, settled = self._dispatcher.load_report(report, self._clock())
        self._metrics.report(heard)
        self._settle(settled)
        self._pump()

    def on_progress(self, progress: Progress) -> None:
        if progress.phase == "first_token":
            outcome = self._dispatcher.first_token(progress.request_id, self._clock())
            if outcome is not None:
                self._metrics.first_token(outcome)
        elif progress.phase == "finished":
            self._settle(self._dispatcher.leave_queue(progress.request_id, "the client has gone"))
            self._dispatcher.finished(progress.request_id)
            self._pump()

    def on_decision(self, decision: Decision) -> None:
        if decision.router_id != self._router_id:
            heard, settled = self._dispatcher.apply_decision(decision, self._clock())
            self._metrics.decision(heard)
            self._settle(settled)
            self._pump()

    def _pump(self) -> None:
        self._settle(self._dispatcher.pump(self._clock()))
        self._metrics.take_over()
        self._changed()
