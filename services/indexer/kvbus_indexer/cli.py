"""``kvbus indexer``."""

from collections.abc import Sequence

from kvbus_indexer.app import start
from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime.service import run_service
from kvbus_runtime.settings import parse_settings

_DESCRIPTION = "Knows which worker and tier holds which KV block, and answers the routers' questions about it."


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(IndexerSettings, service="indexer", description=_DESCRIPTION, argv=argv)
    return run_service("indexer", settings, start)
