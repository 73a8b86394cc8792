"""What `kvbus up` refuses before it prepares or starts anything."""

from pathlib import Path

import pytest

from kvbus_cli.up.command import main, options_of, parser, refused_setting, services_to_check


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    return capsys.readouterr().err.strip().splitlines()[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--engine", "mok"], "there is no engine 'mok'; there are torch, mock"),
        (["--engin", "mock"], "--engin"),
        (["--http-port", "99999"], "99999 is no port"),
        (["--http-port", "0"], "0 is no port"),
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--set", "kvbm.x"], "SERVICE.NAME=VALUE"),
        (["--workers", "99999999"], "at most 1024"),
        (["--nats", "nats://127.0.0.1:1", "--http-port", "20001"], "no bus at 127.0.0.1:1"),
        (["--nats", "nats://127.0.0.1:many", "--http-port", "20001"], "is no address of a bus"),
    ],
)
def test_an_argument_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    assert named in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("kvbm.arena_dri=/tmp", "unknown option --arena-dri (did you mean --arena-dir?)"),
        ("worker.max_waiting=many", "--max-waiting: 'many'"),
        ("kvbm.g2_bytes=99999999999999999999", "at most 9223372036854775807"),
        ("worker-1.role=cook", "role must be one of both, prefill, decode"),
        ("worker-7.role=prefill", "there are indexer, kvbm, worker-0, worker-1"),
    ],
)
def test_a_setting_that_its_service_refuses_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str, named: str
) -> None:
    assert named in refusal(capsys, "--set", setting, "--http-port", "20001", "--state-dir", str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("flags", [("--mock-speedup", "0"), ("--log-level", "loud"), ("--drain-timeout-s", "-1")])
def test_what_a_service_would_refuse_is_refused_before_anything_starts(flags: tuple[str, str]) -> None:
    options = options_of(parser().parse_args(["--engine", "mock", *flags]), ".")
    refusal = refused_setting(options, services_to_check(options, parser().parse_args([])))
    assert flags[0].strip("-").replace("-", "_") in refusal


def test_the_usual_settings_need_no_check() -> None:
    usual = parser().parse_args([])
    assert services_to_check(options_of(usual, "."), usual) == set()
