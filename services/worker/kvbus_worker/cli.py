"""Command line of the worker."""

from collections.abc import Sequence

from kvbus_runtime.service import run_service
from kvbus_runtime.settings import parse_settings
from kvbus_worker.app import start
from kvbus_worker.settings import WorkerSettings

DESCRIPTION = "Run one token engine and its KV blocks as a service on the bus."


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(WorkerSettings, service="worker", description=DESCRIPTION, argv=argv)
    return run_service("worker", settings, start)
