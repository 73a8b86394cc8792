"""`make agents`: install the pinned clients, then run the tests where nothing but loopback can be reached.

    python -m tests.agents [CLIENT ...] [OPTION OF PYTEST ...]

A client is what its test files are named after: test_claude_code.py and test_claude_code_faults.py, claude-code.

The last line says how many scenarios passed, failed and were skipped; the exit status is 1 when one failed.
"""

import os
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.agents import isolation
from tests.agents.install import install

HERE = Path(__file__).parent
_INSIDE = "--inside"


class Counts:
    """A pytest plugin that counts scenarios.

    One that breaks before or after its test counts as failed, once, and so does one that an interrupt kept from its end.
    """

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}
        self._unfinished: set[str] = set()
        self.errors = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._unfinished.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._unfinished.discard(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rank = ("passed", "skipped", "failed")
        known = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(known, report.outcome, key=rank.index)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.errors += report.failed

    def __str__(self) -> str:
        outcomes = list((self._outcomes | dict.fromkeys(self._unfinished, "failed")).values())
        failed = outcomes.count("failed") + self.errors
        return f"{outcomes.count('passed')} passed, {failed} failed, {outcomes.count('skipped')} skipped"


def known_clients() -> dict[str, list[Path]]:
    """The test files of each client. test_a_b.py is one of client `a` when there is a test_a.py."""
    files = {file.stem: file for file in sorted(HERE.glob("test_*.py"))}
    firsts = [stem for stem in files if not any(stem.startswith(f"{other}_") for other in files)]
    return {
        first.removeprefix("test_").replace("_", "-"): [
            file for stem, file in files.items() if stem == first or stem.startswith(f"{first}_")
        ]
        for first in firsts
    }


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == [_INSIDE]:
        return _run_inside(arguments[1:])
    known = known_clients()
    clients = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = arguments[len(clients) :]
    clients = clients or list(known)
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
        *(str(file) for name in clients for file in known[name]),
    ]
    return _become(command)


def _become(command: list[str]) -> NoReturn:
    """Whoever ends this process ends the tests."""
    os.execvp(command[0], command)  # noqa: S606


def _run_inside(arguments: Sequence[str]) -> int:
    # A shell starts what runs in the background with Ctrl-C ignored, and the clients that are to be cancelled would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The system under test ends with the tests, whoever ends them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if isolation.REASON not in os.environ:
        isolation.bring_loopback_up()
    counts = Counts()
    status = pytest.main(["-p", "no:cacheprovider", *arguments], plugins=[counts])
    print(counts)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
