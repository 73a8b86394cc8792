import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvbus_replay import command, record_command, synth_command

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
        ["--typical-calls", "inf"],
        ["--typical-tool-tokens", "1e308"],
        ["--pause-s", "0", "inf"],
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert synth_command.main([str(tmp_path / "t"), *flags]) == 2
    assert flags[0][2:].replace("-", "_") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--speedup", "0"],
        ["--speedup", "inf"],
        ["--prefill-tokens-per-s", "-1"],
        ["--copy-tokens-per-s", "0"],
        ["--max-calls", "-1"],
    ],
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


def test_the_report_says_on_what_cluster_it_was_made(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shape = ["--kv-tokens", "9000", "--speedup", "2", "--g2-tokens", "5000", "--max-calls", "5", "--seed", "3"]
    assert command.main([str(trace), "--workers", "2", "--policy", "random", *shape, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    cluster = report["cluster"]
    assert (report["calls"], report["seed"], cluster["workers"]) == (5, 3, 2)
    assert (cluster["worker"]["kv_tokens"], cluster["worker"]["timing"]["speedup"]) == (9000, 2.0)
    assert cluster["host"]["g2_tokens"] == 5000


def test_a_replay_in_which_every_call_fails_says_why_and_fails(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(trace), "--workers", "2", "--policy", "random", "--kv-tokens", "100"]) == 1
    error = capsys.readouterr().err
    assert "context_length_exceeded" in error
    assert "hold 100 (--kv-tokens)" in error
    assert "nothing to compare" in error


def test_calls_that_fail_beside_others_are_said_with_their_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(trace), "--workers", "2", "--policy", "random", "--kv-tokens", "1200"]) == 0
    assert "calls failed: " in capsys.readouterr().err


@pytest.mark.parametrize("verb", [command, synth_command])
def test_help_tells_what_holds_without_a_flag(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: 64)" in said or "(default: 10000 50000)" in said


def test_a_recording_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.jsonl"
    path.write_text("of yesterday")
    nowhere = ["--nats", "nats://127.0.0.1:1", "--connect-timeout-s", "0.05"]
    assert record_command.main([str(path), *nowhere]) == 2
    assert "--force" in capsys.readouterr().err
    assert record_command.main([str(path), "--force", *nowhere]) == 1
    assert path.read_text() == "of yesterday"


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
