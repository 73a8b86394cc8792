import json
from pathlib import Path

import pytest

from kvbus_blocks.flash import FlashUnavailable
from kvbus_cli.bench import index, index_load

PERCENTILES = ["512", "3250", "3250_listed", "3250_writing", "all", "all_listed", "distinct"]


def test_the_figures_are_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a load of a hundredth: the real one takes most of a minute."""
    monkeypatch.setattr(index, "QUERIES", 20)
    monkeypatch.setattr(index, "WORKERS", 50)
    monkeypatch.setattr(index_load, "APPLICATIONS", 3)
    monkeypatch.setattr(index_load, "SESSIONS", 5)
    file = tmp_path / "index.json"
    assert index.main(["--json", str(file), "--blocks", "20000"]) == 0
    figures = json.loads(file.read_text())
    stores = {"stores_per_s_1thread", "stores_per_s_2threads", "stores_distinct_per_s", "bytes_per_block"}
    matches = {f"match_{name}_{share}_us" for name in PERCENTILES for share in ("p50", "p99")}
    assert (stores | matches) <= figures.keys()
    assert all(figures[name] > 0 for name in stores | matches)


def test_where_there_is_no_compiled_index_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise FlashUnavailable("the compiler died")

    monkeypatch.setattr(index, "flash_maker", refuse)
    assert index.main([]) == 1
    assert "the compiler died" in capsys.readouterr().err
