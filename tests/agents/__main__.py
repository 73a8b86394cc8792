"""`make agents`: install the pinned clients, then run the tests where nothing but loopback can be reached.

    python -m tests.agents [CLIENT ...]     a client is what its test file is named after: test_claude_code.py, claude-code

The last line says how many scenarios passed, failed and were skipped; the exit status is 1 when one failed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agents import isolation
from tests.agents.install import install

HERE = Path(__file__).parent
_INSIDE = "--inside"


class Counts:
    """A pytest plugin that counts scenarios: one that breaks before or after its test counts as failed, once."""

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}
        self.errors = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rank = ("passed", "skipped", "failed")
        known = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(known, report.outcome, key=rank.index)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.errors += report.failed

    def __str__(self) -> str:
        outcomes = list(self._outcomes.values())
        failed = outcomes.count("failed") + self.errors
        return f"{outcomes.count('passed')} passed, {failed} failed, {outcomes.count('skipped')} skipped"


def known_clients() -> dict[str, Path]:
    files = sorted(HERE.glob("test_*.py"))
    return {file.stem.removeprefix("test_").replace("_", "-"): file for file in files}


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == [_INSIDE]:
        return _run_inside(arguments[1:])
    known = known_clients()
    options = [argument for argument in arguments if argument.startswith("-")]
    clients = [argument for argument in arguments if not argument.startswith("-")] or list(known)
    if unknown := [client for client in clients if client not in known]:
        print(f"no tests of {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    prefix, reason = isolation.entry_command()
    if reason:
        os.environ[isolation.REASON] = reason
    else:
        for failure in install(clients):
            print(f"not installed: {failure}", flush=True)
    sys.stdout.flush()
    command = [
        *prefix,
        sys.executable,
        "-m",
        "tests.agents",
        _INSIDE,
        *options,
        *(str(known[name]) for name in clients),
    ]
    return subprocess.run(command, check=False).returncode


def _run_inside(arguments: Sequence[str]) -> int:
    if isolation.REASON not in os.environ:
        isolation.bring_loopback_up()
    counts = Counts()
    status = pytest.main(["-p", "no:cacheprovider", *arguments], plugins=[counts])
    print(counts)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
