"""Which systems run here, and the hint that follows from it."""

import os
from pathlib import Path

import pytest

from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.running import STATUS_FILE, bus_hint, running_systems
from kvbus_cli.tool import ToolSettings
from kvbus_cli.up.status import StatusFile, SystemStatus

GONE_PID = 2**22 + 1
"""Above what Linux gives out."""


def write(root: Path, name: str, *, state: str = "ready", pid: int = os.getpid(), nats_url: str = "nats://h:1") -> None:
    folder = root / name
    folder.mkdir(parents=True)
    StatusFile(folder / STATUS_FILE).write(
        SystemStatus(state=state, pid=pid, url="", nats_url=nats_url, namespace="n", state_dir=str(folder)), []
    )


def test_only_systems_that_run_are_found(tmp_path: Path) -> None:
    write(tmp_path, "up-1")
    write(tmp_path, "up-2", state="stopped")
    write(tmp_path, "up-3", pid=GONE_PID)
    write(tmp_path, "up-4", nats_url="")
    (tmp_path / "up-5").mkdir()
    (tmp_path / "up-5" / STATUS_FILE).write_text("{")
    assert [system.nats_url for system in running_systems(tmp_path)] == ["nats://h:1"]


def test_where_the_default_bus_is_away_the_option_is_named(tmp_path: Path) -> None:
    assert "give --nats URL" in bus_hint(ToolSettings(), tmp_path)
    write(tmp_path, "up-1")
    assert bus_hint(ToolSettings(), tmp_path).endswith("give --nats nats://h:1 --namespace n")
    assert bus_hint(ToolSettings(nats="nats://elsewhere:4222"), tmp_path) == ""


def test_a_tool_that_finds_no_bus_says_so_with_the_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write(tmp_path / "kvbus", "up-1", nats_url="nats://h:7")
    monkeypatch.setattr("kvbus_cli.asking.CONNECT_TIMEOUT_S", 0.0)

    async def never(bus: object) -> None:
        raise AssertionError

    with pytest.raises(NotAnswered, match=r"no bus at .*give --nats nats://h:7 --namespace n"):
        run(ToolSettings(), "kvbm", never)
