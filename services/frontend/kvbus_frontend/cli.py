"""The frontend's command line."""

from collections.abc import Sequence

from kvbus_frontend.app import start_frontend
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.service import run_service
from kvbus_runtime.settings import parse_settings

DESCRIPTION = (
    "HTTP API of kvbus: chat templates, tokenizing, streaming, usage. Finds models, workers and routers over NATS."
)


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(FrontendSettings, service="frontend", description=DESCRIPTION, argv=argv)
    return run_service("frontend", settings, start_frontend)
