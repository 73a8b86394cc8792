"""Settings of the frontend are checked before anything starts."""

from typing import Any

import pytest

from kvbus_frontend.cli import main
from kvbus_frontend.settings import FrontendSettings


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


def test_the_command_line_shows_its_help_and_refuses_bad_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        main(["--help"])
    assert shown.value.code == 0
    assert "--http-port" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["--http-port", "99999"])
    assert refused.value.code == 2
