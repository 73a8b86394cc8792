"""Telling the routers about the load."""

import asyncio
from collections.abc import Callable

from kvbus_runtime.bus import Bus
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_tokens
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.load_pacing import LoadPacing
from kvbus_worker.core.requests import RequestTable
from kvbus_worker.engines.base import Engine


class LoadReporter:
    """``request_ids`` and ``output_tokens`` of a report are cut so that it fits into one message; it says so then."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        table: RequestTable,
        pacing: LoadPacing,
        *,
        instance_id: str,
        incarnation: int,
        model: str,
        kv_seq: Callable[[], int],
        is_draining: Callable[[], bool],
        onboard_rates: Callable[[], dict[str, float]],
        prefill_ids: Callable[[], tuple[str, ...]],
        handover_s: Callable[[], float],
        metrics: WorkerMetrics,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._table = table
        self._pacing = pacing
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._model = model
        self._kv_seq = kv_seq
        self._is_draining = is_draining
        self._onboard_rates = onboard_rates
        self._prefill_ids = prefill_ids
        self._handover_s = handover_s
        self._metrics = metrics
        self._seq = 0
        self._wake = asyncio.Event()

    def changed(self) -> None:
        self._pacing.changed()
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled. What broke the engine is raised here."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            wait_s = self._pacing.wait_s(loop.time())
            if wait_s <= 0:
                self._pacing.published(loop.time())
                await self._bus.publish(self._bus.subjects.load(self._instance_id), self.report())
                continue
            if self._pacing.pending:
                await asyncio.sleep(wait_s)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def report(self) -> LoadReport:
        load = self._engine.load()
        not_submitted = self._table.not_submitted
        self._metrics.note_load(load, not_submitted)
        ids = self._fitting_ids()
        self._seq += 1
        return LoadReport(
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            model=self._model,
            running=load.running,
            waiting=load.waiting + not_submitted,
            waiting_tokens=load.waiting_tokens,
            used_blocks=load.used_blocks,
            total_blocks=load.total_blocks,
            kv_seq=self._kv_seq(),
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            draining=self._is_draining(),
            request_ids=ids,
            output_tokens=pack_tokens(self._table.outputs[: len(ids)]),
            onboard_tokens_per_s=self._onboard_rates(),
            seq=self._seq,
            prefill_ids=self._prefill_ids(),
            handover_s=self._handover_s(),
            ids_cut=len(ids) < len(self._table),
        )

    def _fitting_ids(self) -> tuple[str, ...]:
        ids = self._table.ids
        room = self._bus.max_payload - 4096 - sum(len(each.encode()) + 5 for each in self._prefill_ids())
        # At most 4 bytes a character, 5 of framing, 4 for the output.
        if sum(map(len, ids)) * 4 + 9 * len(ids) <= room:
            return ids
        fitting = []
        for request_id in ids:
            room -= len(request_id.encode()) + 9
            if room < 0:
                break
            fitting.append(request_id)
        return tuple(fitting)
