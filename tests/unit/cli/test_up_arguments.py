"""What `kvbus up` refuses before it prepares or starts anything."""

from pathlib import Path

import pytest

from kvbus_cli.up.command import main


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--engine", "mok"], "there is no engine 'mok'; there are torch, mock"),
        (["--engin", "mock"], "--engin"),
        (["--http-port", "99999"], "99999 is no port"),
        (["--http-port", "0"], "0 is no port"),
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--set", "kvbm.x"], "SERVICE.NAME=VALUE"),
    ],
)
def test_an_argument_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    assert named in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("kvbm.arena_dri=/tmp", "unknown option --arena-dri (did you mean --arena-dir?)"),
        ("worker.max_waiting=many", "--max-waiting: 'many'"),
    ],
)
def test_a_setting_that_its_service_refuses_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str, named: str
) -> None:
    assert named in refusal(capsys, "--set", setting, "--http-port", "20001", "--state-dir", str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
