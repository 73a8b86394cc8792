"""``kvbus kvbm``."""

import sys
from collections.abc import Sequence

from kvbus_kvbm.adapters.arenas import check_place
from kvbus_kvbm.app import start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import run_service
from kvbus_runtime.settings import EXIT_BAD_CONFIG, BadSettings, parse_settings

_DESCRIPTION = "Keeps KV blocks in host memory for the workers of this host (tier G2)."


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(KvbmSettings, service="kvbm", description=_DESCRIPTION, argv=argv)
    try:
        check_place(settings.arena_dir, settings.arena_group)
    except BadSettings as problem:
        sys.stderr.write(f"kvbus kvbm: error: {problem}\n")
        return EXIT_BAD_CONFIG
    return run_service("kvbm", settings, start)
