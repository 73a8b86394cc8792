"""The last line of `make agents`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

_SCENARIOS = """
import os, signal

signal.signal(signal.SIGINT, signal.default_int_handler)

def test_one_that_passes(): ...

def test_one_that_is_interrupted():
    os.kill(os.getpid(), signal.SIGINT)

def test_one_that_never_begins(): ...
"""

_RUN = """
import sys, pytest
from tests.agents.__main__ import Counts

counts = Counts()
pytest.main(["-p", "no:cacheprovider", "-c", sys.argv[1] + "/pytest.ini", sys.argv[1]], plugins=[counts])
print(counts)
"""


def test_a_scenario_that_was_interrupted_counts_as_failed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (tmp_path / "test_scenarios.py").write_text(_SCENARIOS)
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1] == "1 passed, 1 failed, 0 skipped", ended.stderr
