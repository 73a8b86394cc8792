"""Settings of the frontend are checked before anything starts."""

from typing import Any

import pytest

from kvbus_frontend.cli import main
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.settings import parse_settings


@pytest.mark.parametrize(
    "setting",
    [
        {"http_port": -1},
        {"http_port": 65536},
        {"max_body_bytes": 0},
        {"max_concurrent_requests": 0},
        {"keep_alive_s": 0},
        {"migration_limit": -1},
        {"tokenizer_threads": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: dict[str, Any]) -> None:
    [name] = setting
    with pytest.raises(ValueError, match=name):
        FrontendSettings(**setting)


def test_keys_are_separated_by_commas() -> None:
    assert FrontendSettings(api_key=" a, b,,").api_keys == ("a", "b")
    assert FrontendSettings().api_keys == ()


def settings_of(*argv: str) -> FrontendSettings:
    return parse_settings(FrontendSettings, service="frontend", description="", argv=argv, env={})


def test_all_apis_and_the_stripping_are_on_and_the_events_of_our_own_are_off() -> None:
    for settings in (
        settings_of(),
        settings_of("--http-port", "8000", "--enable-anthropic-api", "--strip-anthropic-preamble"),
    ):
        assert settings.enable_openai_api
        assert settings.enable_anthropic_api
        assert settings.strip_anthropic_preamble
        assert not settings.enable_streaming_tool_dispatch
        assert not settings.enable_streaming_reasoning_dispatch


def test_switches_are_spelled_as_the_field_knows_them() -> None:
    on = settings_of("--enable-streaming-tool-dispatch", "--enable-streaming-reasoning-dispatch")
    assert on.enable_streaming_tool_dispatch
    assert on.enable_streaming_reasoning_dispatch
    off = settings_of("--no-enable-anthropic-api", "--no-strip-anthropic-preamble", "--no-enable-openai-api")
    assert not off.enable_anthropic_api
    assert not off.enable_openai_api
    assert not off.strip_anthropic_preamble


def test_the_command_line_shows_its_help_and_refuses_bad_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        main(["--help"])
    assert shown.value.code == 0
    assert "--http-port" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["--http-port", "99999"])
    assert refused.value.code == 2
