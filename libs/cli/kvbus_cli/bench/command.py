"""Picks the measurement."""

import importlib
import sys
from collections.abc import Sequence

MEASUREMENTS = {
    "startup": "how long each service takes to start, and what it costs when idle",
    "frontend": "what tokenizing and keying a long prompt costs against plain HF tokenizing, and parsing a token",
    "index": "storing, matching and memory of the prefix index: 1,000 workers, 10 million blocks",
    "router": "what a placement costs with 64 and 1,000 workers, and how evenly replicas spread requests",
    "resume": "time to first token of a session that was idle while others took its place, by where its blocks lie",
    "kvbm": "onboarding from host memory and disk against plain copies and reads, and what write-through costs decoding",
    "prefix-stability": "what a line that changes at the top of a prompt costs, and a thought that changes in its middle",
}

ELSEWHERE = {"router": "kvbus_replay.router_bench_command"}
"""Modules of measurements that need the services' cores."""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in MEASUREMENTS:
        lines = [
            "usage: kvbus bench MEASUREMENT ...",
            "",
            *(f"  {name:<18}{text}" for name, text in MEASUREMENTS.items()),
        ]
        help_wanted = bool(argv) and argv[0] in ("-h", "--help")
        print("\n".join(lines), file=sys.stdout if help_wanted else sys.stderr)
        if help_wanted:
            raise SystemExit(0)
        return 2
    module = ELSEWHERE.get(argv[0], f"kvbus_cli.bench.{argv[0].replace('-', '_')}")
    status: int = importlib.import_module(module).main(argv[1:])
    return status
