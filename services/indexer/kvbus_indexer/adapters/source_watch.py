"""Says loudly which workers have no event source."""

import asyncio
from typing import Any

from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.sources import Silence

INTERVAL_S = 1.0
_HINTS = {
    Silence.DECLARED: "its engine has no KV events; what it holds is guessed from routing decisions",
    Silence.SILENT: "it holds blocks and has emitted no KV event; does its engine, or its adapter, have them switched off?",
    Silence.UNHEARD: "it says that it emits KV events, and none arrives; may it write to the event stream?",
}


class SourceWatch:
    """Each worker is named once, and once more when it is heard."""

    def __init__(self, catalog: Catalog, log: Any) -> None:
        self._catalog = catalog
        self._log = log
        self._clock = asyncio.get_running_loop().time
        self._known: dict[str, Silence] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()

    def look(self) -> None:
        silent = self._catalog.silent_workers(self._clock())
        for worker, why in silent.items():
            if self._known.get(worker) is not why:
                say = self._log.info if why is Silence.DECLARED else self._log.warning
                say("worker_without_events", worker=worker, why=why.value, hint=_HINTS[why])
        for worker in self._known.keys() - silent.keys():
            if self._catalog.instance(worker) is not None:
                self._log.info("worker_heard", worker=worker)
        self._known = silent
