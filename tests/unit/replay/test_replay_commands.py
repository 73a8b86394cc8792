import json
import sys
from pathlib import Path

import pytest

from kvbus_replay import command, synth_command

SMALL = [
    *("--sessions", "4", "--typical-calls", "3", "--harnesses", "1", "--system-tokens", "500", "900"),
    *("--typical-output-tokens", "20", "--max-output-tokens", "40"),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    assert synth_command.main([str(path), "--seed", "1", *SMALL]) == 0
    return path


def test_equal_arguments_write_equal_files(trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl.gz"
    synth_command.main([str(again), "--seed", "1", *SMALL])
    assert again.read_bytes() == trace.read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ["--user-tokens", "9", "1"],
        ["--sessions-per-s", "0"],
        ["--harnesses", "0"],
        ["--block-size", "0"],
        ["--system-tokens", "0", "5"],
        ["--pause-s", "-1", "5"],
        ["--fan-out", "1.5"],
        ["--typical-calls", "nan"],
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert synth_command.main([str(tmp_path / "t"), *flags]) == 2
    assert flags[0][2:].replace("-", "_") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags", [["--speedup", "0"], ["--prefill-tokens-per-s", "-1"], ["--copy-tokens-per-s", "0"], ["--max-calls", "-1"]]
)
def test_rates_that_cannot_be_are_refused(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([str(tmp_path / "t"), *flags])
    assert end.value.code == 2


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_results_that_cannot_be_written_are_refused_before_anything_runs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    pytest.importorskip("matplotlib")
    assert command.main([str(trace), flag, str(tmp_path / "not" / "there")]) == 2
    printed = capsys.readouterr()
    assert "there is no folder" in printed.err
    assert " hit " not in printed.out


def test_every_policy_that_is_asked_for_has_a_line_and_an_entry(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    policies = ["--policy", "kv", "--policy", "random"]
    assert command.main([str(trace), "--workers", "3", *policies, "--json", str(out), "--plot", str(picture)]) == 0
    report = json.loads(out.read_text())
    assert (
        [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        == list(report["policies"])
        == ["kv", "random"]
    )
    kv = report["policies"]["kv"]
    assert 0 < kv["hit_rate"] <= kv["oracle_hit_rate"] < 1
    assert {"p50", "p90", "p99"} <= set(kv["ttft_s"]) & set(kv["inter_token_s"]) & set(kv["router_queue_s"])
    assert kv["busy_share"]["peak"] >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main([str(tmp_path / "not-even-there"), "--plot", "out.png"]) == 2
    assert "pip install 'kvbus[plot]'" in capsys.readouterr().err


def test_an_unknown_policy_and_a_bad_trace_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    assert command.main([str(bad), "--policy", "best"]) == 2
    assert "unknown policy 'best'" in capsys.readouterr().err
    assert command.main([str(bad)]) == 2
    assert "bad.jsonl:1:" in capsys.readouterr().err
