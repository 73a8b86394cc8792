"""The command itself: verbs, passthrough, overrides."""

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvbus_cli.__main__ import VERBS, main
from kvbus_cli.services import SERVICES
from kvbus_cli.up.command import _override


@pytest.fixture
def fake_indexer(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    module = types.ModuleType("kvbus_indexer.cli")

    def run() -> int:
        calls.append(list(sys.argv))
        return 7

    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvbus_indexer.cli", module)
    monkeypatch.setattr(sys, "argv", ["kvbus"])
    return calls


def test_a_service_verb_hands_its_arguments_through(fake_indexer: list[list[str]]) -> None:
    assert main(["indexer", "--nats", "nats://h:1", "--help"]) == 7
    assert fake_indexer == [["kvbus indexer", "--nats", "nats://h:1", "--help"]]


def test_check_config_is_the_service_s_own_verb(fake_indexer: list[list[str]]) -> None:
    assert main(["check-config", "indexer", "--log-level", "debug"]) == 7
    assert fake_indexer == [["kvbus indexer", "check-config", "--log-level", "debug"]]


def test_check_config_of_no_service_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "gateway"]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in [*SERVICES, *VERBS])


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "'serve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["index"], 2), (["index", "--help"], 0), (["index", "tip"], 2), (["trace", "--verbose"], 2)],
)
def test_the_first_word_of_some_verbs_lists_those(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    printed = capsys.readouterr()
    text = printed.out if status == 0 else printed.err
    group = arguments[0]
    assert all((f"kvbus {name} " in text) == name.startswith(f"{group} ") for name in VERBS)
    assert ("there is no verb 'index tip'" in text) == (arguments[-1] == "tip")


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"check-config"}))
def test_every_tool_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"kvbus {verb}" in capsys.readouterr().out


def test_ctrl_c_where_a_verb_has_no_ending_of_its_own_is_a_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    module = types.ModuleType("kvbus_cli.version_command")
    module.main = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvbus_cli.version_command", module)
    assert main(["version"]) == 130


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["version"], ""), (["version"], "1"), (["--help"], ""), (["--help"], "1"), (["connect", "--help"], "")],
)
def test_a_reader_that_leaves_early_is_a_status_and_no_traceback(arguments: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "kvbus_cli", *arguments],
            stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_pipe_that_breaks_elsewhere_is_not_taken_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str]) -> int:
        raise BrokenPipeError

    module = types.ModuleType("kvbus_cli.version_command")
    module.main = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvbus_cli.version_command", module)
    with Path(os.devnull).open("w") as read:
        monkeypatch.setattr(sys, "stdout", read)
        monkeypatch.setattr(sys, "stderr", read)
        with pytest.raises(BrokenPipeError):
            main(["version"])


def test_an_override_names_service_setting_and_value() -> None:
    assert _override("worker.device=cuda:0") == ("worker", "device", "cuda:0")


@pytest.mark.parametrize("text", ["device=cuda", "gateway.x=1", "worker.device", "worker.=1"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        _override(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--workers", "x"],
        ["chat", "--bogus"],
        ["replay"],
        ["kv", "ls", "bogus"],
        ["prompt", "diff"],
        ["worker", "bogus"],
        ["worker", "--bogus"],
        ["events", "--tier", "g9"],
    ],
)
def test_a_mistake_is_one_line_and_a_hint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert ": error: " in error
    assert "--help" in hint


def test_an_argument_that_a_service_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "bogus"])
    assert "unexpected argument 'bogus': besides options there is only check-config" in capsys.readouterr().err
