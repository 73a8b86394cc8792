"""State directory, status file, readiness answers, ports."""

import json
import random
import socket
from pathlib import Path

import pytest

from kvbus_cli.up.ports import FIRST, LAST, free_port_picker, is_free
from kvbus_cli.up.readiness import waits_for
from kvbus_cli.up.state_dir import StateDirInUse, StateDirUnusable, locked
from kvbus_cli.up.status import StatusFile, SystemStatus


def test_a_state_directory_serves_one_system_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "state"),
        pytest.raises(StateDirInUse, match="in use by process"),
        locked(tmp_path / "state"),
    ):
        pass
    with locked(tmp_path / "state"):
        assert (tmp_path / "state" / "logs").is_dir()


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirUnusable, match="file/state cannot be used"), locked(tmp_path / "file" / "state"):
        pass


def test_the_status_file_is_complete_json_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    status = SystemStatus(state="ready", pid=1, url="http://h:1", nats_url="nats://h:2", namespace="n", state_dir="/s")
    StatusFile(file).write(status, [])
    assert json.loads(file.read_text())["url"] == "http://h:1"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            b'{"ready": false, "checks": {"bus": {"ok": true}, "model": {"ok": false, "detail": "loading 40%"}}}',
            "model: loading 40%",
        ),
        (b'{"ready": false, "checks": {"bus": {"ok": false, "detail": ""}}}', "bus"),
        (b'{"ready": true, "checks": {"bus": {"ok": true}}}', ""),
        (b"[]", ""),
        (b"not json", ""),
    ],
)
def test_the_first_failing_check_says_what_is_waited_for(body: bytes, reason: str) -> None:
    assert waits_for(body) == reason


def test_picked_ports_are_free_and_differ() -> None:
    pick = free_port_picker(random.Random(1))
    ports = [pick() for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(FIRST <= port < LAST for port in ports)


@pytest.mark.parametrize("port", [-1, 65_536, 10**20])
def test_a_number_that_is_no_port_is_not_free(port: int) -> None:
    assert not is_free("127.0.0.1", port)


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("127.0.0.1", server.getsockname()[1])
