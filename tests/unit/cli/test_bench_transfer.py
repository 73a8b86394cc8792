import json
from pathlib import Path
from unittest import mock

import pytest

from kvbus_cli.bench import transfer
from kvbus_cli.bench.command import main

KIB, MIB = 1 << 10, 1 << 20


def test_each_backend_is_measured_beside_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SIZES", (16 * KIB, 4 * MIB))
    monkeypatch.setattr(transfer, "MEMORY_BYTES", 16 * MIB)
    monkeypatch.setattr(transfer, "ROUND_BYTES", 4 * MIB)
    monkeypatch.setattr(transfer, "WARM_UP_S", 0.01)
    figures = tmp_path / "figures.json"
    assert main(["transfer", "--backends", "shm", "tcp", "--rounds", "1", "--json", str(figures)]) == 0
    told = json.loads(figures.read_text())
    assert told["unavailable"] == {}
    for backend in ("shm", "tcp"):
        assert set(told["results"][backend]) == {str(16 * KIB), str(4 * MIB)}
        for row in told["results"][backend].values():
            assert all(row[name] > 0 for name in ("gbps", "limit_gbps", "p50_us", "p99_us", "depth"))


def test_a_backend_that_is_not_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "MEMORY_BYTES", 16 * MIB)
    gone = dict.fromkeys(("nixl_cu12._api", "nixl_cu13._api", "nixl._api"))
    with mock.patch.dict("sys.modules", gone):
        assert main(["transfer", "--backends", "nixl"]) == 1
    assert "kvbus[nixl]" in capsys.readouterr().err
