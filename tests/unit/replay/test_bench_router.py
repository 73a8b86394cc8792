from pathlib import Path

import msgspec
import pytest

from kvbus_replay.router_bench_command import Figures, main
from kvbus_replay.simulation.herding import Scene


def test_replicas_that_share_out_the_workers_do_not_herd() -> None:
    """Eight requests at the same moment, at eight routers; 64 workers."""
    herd = Scene(routers=8, everyone=True, seconds=1.5).run()
    spread = Scene(routers=8, seconds=1.5).run()
    alone = Scene(routers=1, everyone=True, seconds=1.5).run()
    assert alone.same_worker < 1.5
    assert spread.same_worker < 3 < herd.same_worker
    assert alone.ttft_mean_s < spread.ttft_mean_s < herd.ttft_mean_s
    assert spread.backlog_max_s < herd.backlog_max_s


def test_the_figures_are_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["--placements", "5", "--seconds", "0.2", "--json", str(file)]) == 0
    figures = msgspec.json.decode(file.read_bytes(), type=Figures)
    assert figures.place_1000_p50_us > 0
    assert [(row.routers, row.compares, row.shares) for row in figures.herding][-1] == (8, "some", True)
    assert "largest backlog" in capsys.readouterr().out
