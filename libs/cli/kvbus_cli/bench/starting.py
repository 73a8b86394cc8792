"""Services started one after the other, each when what it waits for is ready; and ended with the measurement that uses them."""

import asyncio
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.processes import Child, ProcessSet, exit_text
from kvbus_cli.up.readiness import probe

READY_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 0.01


T = TypeVar("T")


def run_with_services(measurement: Coroutine[Any, Any, T]) -> T:
    """Run a measurement that ends its services when it is cancelled: SIGTERM and SIGHUP do that, and raise SystemExit then.

    Without it a signal ends this process alone, and services that notice its end later.
    """
    received: list[signal.Signals] = []
    outcome: list[T] = []

    async def stoppable() -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            if task is not None and len(received) == 1:  # a second one must not interrupt the ending
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal, number)
        try:
            outcome.append(await measurement)
        except asyncio.CancelledError:
            if not received:
                raise

    asyncio.run(stoppable())
    if received:
        raise SystemExit(128 + received[0])
    return outcome[0]


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
