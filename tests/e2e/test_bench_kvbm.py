"""`kvbus bench kvbm` on little data: the way, not the figures."""

import json
import subprocess
import sys
from pathlib import Path

from kvbus_testkit.timing import scaled


def test_it_measures_onboarding_from_host_memory_and_disk(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = ["--no-decode", "--blocks", "8", "--block-bytes", str(64 << 10), "--rounds", "1", "--g3-dir", str(tmp_path)]
    command = [sys.executable, "-m", "kvbus_cli", "bench", "kvbm", *flags, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), check=False)
    assert done.returncode in (0, 3), done.stderr + done.stdout
    figures = json.loads(out.read_text())
    assert (figures["blocks"], figures["block_bytes"], figures["decode"]) == (8, 64 << 10, None)
    for rate in ("memcpy_bytes_per_s", "g2_bytes_per_s", "disk_bytes_per_s", "g3_bytes_per_s"):
        assert figures[rate] > 0
    assert figures["within"] is (done.returncode == 0)
