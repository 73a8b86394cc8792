"""Each engine step's outcome, on its way to the frontends, the KV event stream, the token store and kvbm."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbus_wire.kv_events import Cleared, KvEvent, Removed, Stored
from kvbus_wire.packing import pack_keys
from kvbus_worker.adapters.kvbm import Kvbm
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, StepOutput
from kvbus_worker.handlers.remote_prefill import RemotePrefillHandler
from kvbus_worker.handlers.runner import RequestRunner, StepOutbox


class EventOutbox(Protocol):
    """Numbers KV events and sends them, in order."""

    def emit(self, events: Sequence[KvEvent]) -> None: ...


class StepHandler:
    """The engine's sink. Block events are out before the tokens that depend on them."""

    def __init__(
        self,
        runner: RequestRunner,
        store: TokenStore,
        outbox: StepOutbox,
        events: EventOutbox,
        kvbm: Kvbm | None,
        *,
        prefills: RemotePrefillHandler | None = None,
        changed: Callable[[], None],
        metrics: WorkerMetrics,
        announces: bool = True,
    ) -> None:
        self._runner = runner
        self._store = store
        self._outbox = outbox
        self._events = events
        self._kvbm = kvbm
        self._prefills = prefills
        self._changed = changed
        self._metrics = metrics
        self._announces = announces

    def __call__(self, output: StepOutput) -> None:
        if output.blocks:
            for event in output.blocks:
                self._store.apply(event)
                if self._kvbm is not None:
                    self._kvbm.on_block_event(event)
                self._count(event)
            if self._announces:
                self._events.emit([kv_event(event) for event in output.blocks])
            self._metrics.blocks_cached.set(len(self._store))
            self._metrics.blocks_refused.set(self._store.refused)
        if self._prefills is not None:
            self._prefills.on_step(output)
        for started in output.started:
            self._runner.on_started(started)
        for delta in output.deltas:
            self._runner.on_delta(delta)
        for ended in output.ended:
            self._runner.on_ended(ended)
        self._outbox.flush()
        self._metrics.steps.inc()
        self._changed()

    def _count(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                self._metrics.block_events.labels("stored").inc(len(event.keys))
            case BlocksRemoved():
                self._metrics.block_events.labels("removed").inc(len(event.keys))
            case BlocksCleared():
                self._metrics.block_events.labels("cleared").inc()


def kv_event(event: BlockEvent) -> KvEvent:
    """The bus form: keys packed, token ids left out."""
    match event:
        case BlocksStored(parent, keys, _):
            return Stored(parent, pack_keys(keys))
        case BlocksRemoved(keys):
            return Removed(pack_keys(keys))
        case BlocksCleared():
            return Cleared()
