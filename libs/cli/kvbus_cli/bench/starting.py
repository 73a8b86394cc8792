"""Services started one after the other, each when what it waits for is ready."""

import asyncio
import time
from collections.abc import Sequence

from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.processes import Child, ProcessSet, exit_text
from kvbus_cli.up.readiness import probe

READY_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 0.01


async def start_in_order(processes: ProcessSet, specs: Sequence[ProcessSpec]) -> None:
    """Raise ChildProcessError when a service does not get ready."""
    for spec in specs:
        child = await processes.start(spec)
        await _until_ready(child)


async def _until_ready(child: Child) -> None:
    while True:
        answer = await asyncio.to_thread(probe, child.spec.ready_url)
        elapsed = time.monotonic() - child.started_at
        if answer.ready:
            child.ready_after_s = elapsed
            return
        problem = (
            f"{child.spec.name} waits for {answer.waits_for}"
            if answer.waits_for
            else f"{child.spec.name} does not answer"
        )
        if not child.alive:
            problem = f"{child.spec.name} ended ({exit_text(child.exit_status)})"
        if not child.alive or elapsed > READY_TIMEOUT_S:
            raise ChildProcessError("\n".join([problem, *child.last_lines()]))
        await asyncio.sleep(PROBE_INTERVAL_S)
