"""Workers of one model in the test's own process, some of which compute prompts for others, and one who asks them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvbus_runtime.service import RunningService, StartApp, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import Asker, asking
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually

BLOCK = 16
STREAM_BYTES = 1 << 20
COUNTERS = {"transfer_blocks", "transfer_bytes", "remote_prefill_pulls", "remote_prefill_shared", "remote_prefills"}


def prompt(blocks: int, more: int = 5, seed: int = 0) -> list[int]:
    """Tokens that every tokenizer here has."""
    return [(i * 37 + i // 5 + seed * 11) % 190 + 12 for i in range(blocks * BLOCK + more)]


class Pair:
    """``asker`` asks; the workers (`kvbus_worker.app.WorkerApp`) are there by name until `leave`."""

    def __init__(
        self,
        asker: Asker,
        defaults: Mapping[str, Any],
        stack: AsyncExitStack,
        settings: Callable[..., CommonSettings],
        start: StartApp[Any],
    ) -> None:
        self.asker = asker
        self._settings = settings
        self._start = start
        self._defaults = defaults
        self._stack = stack
        self._workers: dict[str, tuple[AsyncExitStack, RunningService[Any]]] = {}

    async def join(self, name: str, role: str = "both", **fields: Any) -> Any:
        own = AsyncExitStack()
        settings = self._settings(**{**self._defaults, "instance_id": name, "role": role, **fields})
        running = await own.enter_async_context(host("worker", settings, self._start))
        self._stack.push_async_exit(own)
        self._workers[name] = own, running
        return running.app

    async def leave(self, name: str) -> None:
        own, _ = self._workers.pop(name)
        await own.aclose()

    def app(self, name: str) -> Any:
        return self._workers[name][1].app

    def metric(self, name: str, metric: str, **labels: str) -> float:
        metrics = self._workers[name][1].service.metrics
        return metrics.value(f"{metric}_total" if metric in COUNTERS else metric, labels or None)

    async def nothing_is_left(self) -> None:
        """No lease, no staged block, no job, no pull at any worker."""
        gauges = ("transfer_leases", "staged_blocks", "remote_prefills_open", "remote_prefill_pulls_open")

        def left() -> Sequence[tuple[str, str, float]]:
            found = [(name, gauge, self.metric(name, gauge)) for name in self._workers for gauge in gauges]
            return [each for each in found if each[2]]

        await eventually(lambda: not left(), what="the end of all leases and jobs")


@asynccontextmanager
async def workers_for(
    nats_server: NatsServer,
    namespace: str,
    name: str,
    settings: Callable[..., CommonSettings],
    start: StartApp[Any],
    **fields: Any,
) -> AsyncIterator[Pair]:
    """``settings``, ``start``: of the worker, which this package does not know. ``name``: of the model. ``fields``: of all."""
    common: dict[str, Any] = {
        "nats": nats_server.url,
        "namespace": namespace,
        "health_port": -1,
        "kv_stream_max_bytes": STREAM_BYTES,
        "drain_timeout_s": 0.2,
    }
    defaults = {
        **common,
        "host_id": "h",
        "kvbm": False,
        "served_model_name": name,
        "staging_bytes": 1 << 20,
        **fields,
    }
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(asking(CommonSettings(**common), name))
        yield Pair(asker, defaults, stack, settings, start)
