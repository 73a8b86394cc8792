from pathlib import Path
from typing import Annotated

import pytest

from kvbus_runtime.settings import MASK, CommonSettings, Flag, effective, parse_settings


class FrontSettings(CommonSettings, frozen=True, kw_only=True):
    http_port: Annotated[int, Flag("port of the HTTP API")] = 8000
    api_keys: Annotated[tuple[str, ...], Flag("keys", secret=True)] = ()
    preamble: Annotated[bool, Flag("strip it 100%")] = True
    limit: Annotated[int | None, Flag("a limit")] = None
    ratio: Annotated[float, Flag("a ratio")] = 0.5
    mode: Annotated[str, Flag("a mode", choices=("fast", "slow"))] = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio > 1:
            raise ValueError("ratio must be at most 1")


def parse(*argv: str, **env: str) -> FrontSettings:
    return parse_settings(FrontSettings, service="frontend", description="d", argv=argv, env=env)


def refuse(capsys: pytest.CaptureFixture[str], *argv: str, **env: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*argv, **env)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_without_anything_the_defaults_hold() -> None:
    assert parse() == FrontSettings()


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "kvbus.toml"
    file.write_text('namespace = "file"\nlease_ttl_s = 9\n[frontend]\nhttp_port = 1\nratio = 0.25\n[router]\nx = 1\n')
    env = {"KVBUS_CONFIG": str(file), "KVBUS_NAMESPACE": "env", "KVBUS_FRONTEND_HTTP_PORT": "2"}
    settings = parse("--http-port", "3", **env)
    assert (settings.http_port, settings.namespace, settings.lease_ttl_s, settings.ratio) == (3, "env", 9, 0.25)


def test_each_type_is_read_from_text() -> None:
    settings = parse(
        "--api-keys", "a, b,", "--no-preamble", "--limit=5", "--ratio=0.1", "--mode=slow", "--health-port=-1"
    )
    assert settings.api_keys == ("a", "b")
    assert (settings.preamble, settings.limit, settings.ratio, settings.mode) == (False, 5, 0.1, "slow")
    assert settings.health_port == -1


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("OFF", False), ("false", False)])
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert parse(KVBUS_FRONTEND_PREAMBLE=text).preamble is value


def test_an_empty_variable_unsets_an_optional_setting() -> None:
    assert parse(KVBUS_FRONTEND_LIMIT="").limit is None


def test_an_unknown_variable_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    message = refuse(capsys, KVBUS_FRONTEND_HTTP_PROT="1")
    assert "KVBUS_FRONTEND_HTTP_PROT" in message
    assert "KVBUS_FRONTEND_HTTP_PORT" in message


def test_a_common_setting_has_no_variable_per_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert "KVBUS_FRONTEND_NATS" in refuse(capsys, KVBUS_FRONTEND_NATS="nats://x")


def test_variables_of_other_services_and_programs_are_ignored() -> None:
    parse(KVBUS_ROUTER_POLICY="kv", KVBUS_TEST_TIMEOUT_FACTOR="3", KVBUS_UP_WORKERS="2", HOME="/", OTHER="x")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--http-port", "many"], "--http-port"),
        (["--ratio", "2"], "ratio must be at most 1"),
        (["--mode", "odd"], "mode must be one of fast, slow"),
        (["--lease-ttl-s", "1"], "lease_ttl_s"),
        (["--lease-ttl-s", "2.5"], "--lease-ttl-s"),
        (["--namespace", ""], "namespace"),
        (["--nats", " , "], "nats"),
        (["--nats", "nats://h:99999"], "nats"),
        (["--nats", "nats://[h:1"], "nats"),
        (["--nats", "nats://h:port"], "nats"),
        (["--nats", "http://h:4222"], "nats"),
        (["--nats", "nats://user:hidden@:4222"], "://********@"),
        (["--ratio", "nan"], "ratio must be a finite number"),
        (["--drain-timeout-s", "inf"], "drain_timeout_s"),
        (["--health-port", "70000"], "health_port"),
        (["--nats-user", "u", "--nats-creds", "f"], "only one"),
        (["--nats-tls-cert", "f"], "go together"),
        (["--stream-replicas", "0"], "stream_replicas"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--http", "1"], "--http"),
        (["--http-prot", "1"], "unknown option --http-prot (did you mean --http-port?)"),
        (["serve"], "serve"),
    ],
)
def test_bad_settings_end_with_status_2(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    assert named in refuse(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nats = 5", "nats"),
        ("http_port = 1", "http_port"),
        ("[frontend]\nhttp_prot = 1", "http_prot"),
        ('[frontend]\nhttp_port = "1"', "http_port"),
        ("x = [", "kvbus.toml"),
        ("frontend = 5", "frontend"),
    ],
)
def test_bad_files_end_with_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "kvbus.toml"
    file.write_text(text)
    assert named in refuse(capsys, "--config", str(file))


def test_a_bad_secret_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Secretive(CommonSettings, frozen=True, kw_only=True):
        pin: Annotated[int, Flag("a pin", secret=True)] = 0

    with pytest.raises(SystemExit):
        parse_settings(Secretive, service="worker", description="d", argv=[], env={"KVBUS_WORKER_PIN": "hunter2"})
    message = capsys.readouterr().err
    assert "hunter2" not in message
    assert "KVBUS_WORKER_PIN" in message


def test_help_lists_every_setting_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in FrontSettings.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in text
        own = name not in CommonSettings.__struct_fields__
        assert f"env {'KVBUS_FRONTEND_' if own else 'KVBUS_'}{name.upper()}" in text
    assert "default: 8000" in text
    assert "strip it 100%" in text


def test_check_config_prints_the_effective_settings_as_a_file_that_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("check-config", "--http-port", "5", "--limit", "7", KVBUS_NAMESPACE='a"b')
    assert stop.value.code == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    again = parse("--config", str(file))
    assert again == parse("--http-port", "5", "--limit", "7", "--namespace", 'a"b')


def test_secrets_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse(
        "--api-keys", "key-1", "--nats", "nats://user:pw-1@host:4222", "--nats-user", "u", "--nats-password", "pw-2"
    )
    shown = effective(settings)
    assert shown["api_keys"] == shown["nats_password"] == MASK
    assert shown["nats"] == f"nats://{MASK}@host:4222"
    with pytest.raises(SystemExit):
        parse("check-config", "--api-keys", "key-1", "--nats", "nats://user:pw-1@h", "--nats-password", "pw-2")
    text = capsys.readouterr().out
    assert not any(secret in text for secret in ("key-1", "pw-1", "pw-2"))


def test_a_name_that_ends_with_an_underscore_loses_it() -> None:
    class Events(CommonSettings, frozen=True, kw_only=True):
        from_: Annotated[str, Flag("start")] = "new"

    read = parse_settings(Events, service="events", description="d", argv=["--from", "all"], env={})
    assert read.from_ == "all"
    read = parse_settings(Events, service="events", description="d", argv=[], env={"KVBUS_EVENTS_FROM": "all"})
    assert read.from_ == "all"
