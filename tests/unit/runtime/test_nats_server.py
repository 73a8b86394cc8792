"""Finding and configuring the embedded nats-server."""

import stat
import sys
from pathlib import Path

import pytest

from kvbus_runtime.nats_server import NatsServerNotFound, ServerConfig, find_nats_server, read_url, server_version


def fake_binary(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nats-server"
    file.write_text(f"#!/bin/sh\necho nats-server: {version}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def venv_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    return tmp_path / "venv"


def test_the_server_beside_the_interpreter_comes_first(venv_bin: Path, tmp_path: Path) -> None:
    fake_binary(tmp_path / "path", "v2.12.0")
    beside = fake_binary(venv_bin, "v2.11.0")
    assert find_nats_server(str(tmp_path / "path")) == beside


def test_the_server_on_path_is_taken_when_it_is_new_enough(venv_bin: Path, tmp_path: Path) -> None:
    on_path = fake_binary(tmp_path / "path", "v2.12.0")
    assert find_nats_server(str(tmp_path / "path")) == on_path


def test_a_server_that_is_too_old_is_refused_and_named(venv_bin: Path, tmp_path: Path) -> None:
    fake_binary(tmp_path / "path", "v2.9.10")
    with pytest.raises(NatsServerNotFound, match=r"version 2\.9"):
        find_nats_server(str(tmp_path / "path"))


def test_a_binary_without_a_version_counts_as_too_old(tmp_path: Path) -> None:
    assert server_version(fake_binary(tmp_path, "unknown")) == (0, 0)
    assert server_version(tmp_path / "absent") == (0, 0)


def test_the_configuration_holds_the_limits_and_ends_with_the_extra_text(tmp_path: Path) -> None:
    text = ServerConfig(store_dir=tmp_path, port=-1, ports_dir=tmp_path, extra="debug: true").render()
    assert "max_payload: 8388608" in text
    assert 'ping_interval: "10s"' in text, "a cut-off member of a queue group gets its share of questions for minutes"
    assert f'store_dir: "{tmp_path}"' in text
    assert text.endswith("debug: true\n")


def test_a_value_that_would_break_the_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quote"):
        ServerConfig(store_dir=tmp_path, host='"').render()


def test_the_url_is_known_once_the_server_has_written_its_ports(tmp_path: Path) -> None:
    assert read_url(tmp_path, 5) is None
    (tmp_path / "nats-server_5.ports").write_text('{"nats": ["nats://127.0.0.1:4"], "monitoring": []}')
    assert read_url(tmp_path, 5) == "nats://127.0.0.1:4"
