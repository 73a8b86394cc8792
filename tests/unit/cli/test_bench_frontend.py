"""`kvbus bench frontend` measures what it says: equal ids, known beginnings, every format."""

import json
from pathlib import Path

import pytest

from kvbus_cli.bench import frontend
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in byte_level_bundle().files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_figures_tell_what_came_from_the_cache(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--model", str(folder), "--tokens", "9000", "--repetitions", "2", "--json", str(file)]
    assert frontend.main(options) == 0
    figures = json.loads(file.read_bytes())
    cached = {row["name"]: row["cached_tokens"] / figures["prompt_tokens"] for row in figures["prompts"]}
    assert cached["first seen"] == cached["made-up words"] == 0
    assert cached["repeated"] > 0.99
    assert cached["new tail"] > 0.9
    assert 0.4 < cached["other conversation"] < 0.6
    assert cached["grown"] > 0.9
    assert all(row["us_per_token"] > 0 for row in figures["parsers"])
    assert len(figures["parsers"]) == 8


def test_ids_that_differ_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "unpack_tokens", lambda data: [*unpack_tokens(data), 0])
    assert frontend.main(["--model", str(folder), "--tokens", "2000", "--repetitions", "1"]) == 1


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frontend.main(["--model", str(tmp_path)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_folder_without_a_chat_template_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").unlink()
    assert frontend.main(["--model", str(folder)]) == 1
    assert "no chat template" in capsys.readouterr().err
