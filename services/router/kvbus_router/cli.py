"""``kvbus router``."""

import sys
from collections.abc import Sequence

from kvbus_router.adapters.policies import make_policy
from kvbus_router.adapters.policy_classes import load_classes
from kvbus_router.app import start
from kvbus_router.settings import RouterSettings
from kvbus_runtime.service import run_service
from kvbus_runtime.settings import EXIT_BAD_CONFIG, BadSettings, parse_settings

_DESCRIPTION = "Chooses the worker for each request, by cache, load and measured rates, and queues when all are full."


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(RouterSettings, service="router", description=_DESCRIPTION, argv=argv)
    try:
        make_policy(settings.policy)
        load_classes(settings.policy_classes)
    except BadSettings as problem:
        sys.stderr.write(f"kvbus router: error: {problem}\n")
        return EXIT_BAD_CONFIG
    return run_service("router", settings, start)
