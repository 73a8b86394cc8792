"""Small services in the test's own event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvbus_runtime.service import App, Service, host
from kvbus_runtime.settings import CommonSettings


class IdleApp:
    """An app that does nothing; ``drained`` holds the reasons it was told."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.closed = 0

    async def drain(self, reason: str) -> None:
        self.drained.append(reason)

    async def close(self) -> None:
        self.closed += 1


async def start_idle(service: Service, settings: CommonSettings) -> App:
    """Registers and does nothing."""
    await service.register()
    return IdleApp()


@asynccontextmanager
async def running_service(
    url: str,
    namespace: str,
    *,
    name: str = "worker",
    start: Callable[[Service, CommonSettings], Awaitable[App]] = start_idle,
    **settings: object,
) -> AsyncIterator[Service]:
    """A hosted service named ``name`` with these `CommonSettings`; without a health server unless ``health_port`` is given."""
    fields = {"nats": url, "namespace": namespace, "health_port": -1, "log_level": "warning", **settings}
    async with host(name, CommonSettings(**fields), start) as running:  # type: ignore[arg-type]
        yield running.service
