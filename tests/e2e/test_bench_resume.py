"""`kvbus bench resume`: from where an idle session comes back, and what the figures say about it."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvbus_testkit.timing import eventually_sync, scaled
from kvbus_testkit.up import KVBUS, clean_environment, is_alive, run_kvbus

FIELDS = {
    "kvbus_version", "python", "cores", "engine", "tokens", "idle_s", "repetitions", "block_bytes", "max_ratio", "within",
    "figures",
}  # fmt: skip
FIGURE_FIELDS = {"name", "ttft_ms", "ratio", "input_tokens", "cached_tokens", "samples_ms"}
TOKENS = 2000


def test_a_session_that_lost_its_place_comes_back_from_a_tier(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--tokens", str(TOKENS), "--idle-s", "3", "--repetitions", "1", "--json", str(file))
    chosen = ("--only", "prefetched", "from G2", "recomputed")
    result = run_kvbus("bench", "resume", *options, *chosen, timeout_s=100)
    assert file.exists(), result.stderr
    figures = json.loads(file.read_text())
    assert set(figures) == FIELDS
    assert all(set(figure) == FIGURE_FIELDS for figure in figures["figures"])
    by_name: dict[str, dict[str, Any]] = {figure["name"]: figure for figure in figures["figures"]}
    assert list(by_name) == ["never left G1", "prefetched", "from G2", "recomputed"]
    cached = {name: figure["cached_tokens"] for name, figure in by_name.items()}
    assert cached["never left G1"] > 0.9 * TOKENS
    assert min(cached["prefetched"], cached["from G2"]) > cached["recomputed"]
    assert result.returncode == (0 if figures["within"] else 1), result.stderr
    assert f"{by_name['never left G1']['ttft_ms']:.1f}" in result.stdout


def test_a_prompt_that_is_too_short_is_a_bad_argument() -> None:
    assert run_kvbus("bench", "resume", "--tokens", "10").returncode == 2


def services_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_its_services_before_itself(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**clean_environment(), "TMPDIR": str(tmp_path)}
    command = [*KVBUS, "bench", "resume", "--tokens", "2000", "--idle-s", "600", "--only", "prefetched"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        try:
            # The session waits for its tool: that it was answered is in the frontend's log.
            answered = "*/logs/frontend*.log"
            eventually_sync(
                lambda: any('"event": "request"' in log.read_text() for log in tmp_path.glob(f"*/{answered}")),
                timeout_s=60,
                what="a session that waits",
            )
            pids = services_of(bench.pid)
            assert len(pids) >= 6
            os.kill(bench.pid, number)
            assert bench.wait(scaled(30)) == 128 + number
        finally:
            bench.kill()
    assert not any(is_alive(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk either"
