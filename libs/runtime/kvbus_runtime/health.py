"""Named readiness checks, and the HTTP server that shows them with the metrics."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from kvbus_runtime.metrics import CONTENT_TYPE, Metrics


class Check(msgspec.Struct):
    """``since``: on the monotonic clock, when it took its present state."""

    ok: bool
    detail: str
    since: float


class Health:
    """Ready means: every named check is ok and the service is not stopping. Alive means: the event loop answers."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._checks: dict[str, Check] = {}
        self._changed: asyncio.Event = asyncio.Event()
        self._gauge = metrics.gauge("ready", "1 when all readiness checks hold")

    def set(self, name: str, ok: bool, detail: str = "") -> None:
        known = self._checks.get(name)
        if known is None or known.ok != ok:
            self._checks[name] = Check(ok, detail, self._clock())
        else:
            known.detail = detail
        self._gauge.set(1 if self.ready else 0)
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self, name: str) -> None:
        self._checks.pop(name, None)
        self._gauge.set(1 if self.ready else 0)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._checks) and all(check.ok for check in self._checks.values())

    def is_ok(self, name: str) -> bool:
        check = self._checks.get(name)
        return check is not None and check.ok

    async def wait_ready(self) -> None:
        """Return when the service is ready."""
        while not self.ready:
            await self._changed.wait()

    def report(self) -> dict[str, object]:
        now = self._clock()
        return {
            "ready": self.ready,
            "checks": {
                name: {"ok": check.ok, "detail": check.detail, "age_s": round(now - check.since, 3)}
                for name, check in sorted(self._checks.items())
            },
        }

    def routes(self) -> Sequence[web.RouteDef]:
        """``/livez``, ``/readyz`` and ``/metrics``, for any aiohttp application."""
        return [
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics_page),
        ]

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _readyz(self, request: web.Request) -> web.Response:
        return web.json_response(self.report(), status=200 if self.ready else 503)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        body = await asyncio.to_thread(self._metrics.exposition)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


class HealthServer:
    """Serves `Health.routes` on a port of its own. ``url`` is empty until it listens."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        self._app = web.Application()
        self._app.add_routes(health.routes())
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Raise OSError when the port is taken."""
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
