"""`kvbus frontend|router|indexer|worker|kvbm ARGS` and `kvbus check-config SERVICE ARGS`: the service's own command line."""

import importlib
import sys
from collections.abc import Sequence

from kvbus_cli.services import SERVICES


def run_service_cli(service: str, argv: Sequence[str]) -> int:
    """Run the service as if it had been started by its own module."""
    module = f"kvbus_{service}.cli"
    try:
        cli = importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"kvbus: the service {service} cannot be loaded: {error}", file=sys.stderr)
        return 1
    sys.argv = [f"kvbus {service}", *argv]
    status: int = cli.main()
    return status


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in SERVICES:
        help_wanted = bool(argv) and argv[0] in ("-h", "--help")
        usage = f"usage: kvbus check-config {{{','.join(SERVICES)}}} [flags of the service]"
        print(usage, file=sys.stdout if help_wanted else sys.stderr)
        return 0 if help_wanted else 2
    return run_service_cli(argv[0], ["check-config", *argv[1:]])
