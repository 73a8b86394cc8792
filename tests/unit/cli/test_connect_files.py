"""Configurations are merged into what is there: nothing foreign is lost, and what was there is kept."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvbus_cli.connect.configuration import ConfigFile
from kvbus_cli.connect.merging import CannotMerge, merged_text
from kvbus_cli.connect.writing import CannotWrite, write_files


def merged(existing: object, content: dict[str, Any]) -> Any:
    return json.loads(merged_text(json.dumps(existing), ConfigFile(path="f", content=content)))


def test_foreign_settings_stay() -> None:
    existing = {"theme": "dark", "env": {"OTHER": "1", "MODEL": "old"}, "hooks": [1]}
    assert merged(existing, {"env": {"MODEL": "new"}}) == {
        "theme": "dark",
        "env": {"OTHER": "1", "MODEL": "new"},
        "hooks": [1],
    }


def test_an_entry_of_a_list_is_replaced_by_its_newer_self_alone() -> None:
    foreign = {"id": "m", "baseUrl": "http://elsewhere"}
    existing = {"models": [foreign, {"id": "m", "baseUrl": "http://here", "limit": 1}, {"id": "n"}]}
    new = {"id": "m", "baseUrl": "http://here", "limit": 2}
    assert merged(existing, {"models": [new]}) == {"models": [foreign, new, {"id": "n"}]}
    assert merged({"input": ["text", "image"]}, {"input": ["text"]}) == {"input": ["text", "image"]}


def test_toml_keeps_its_comments_and_its_tables() -> None:
    existing = (
        '# mine\nmodel = "old"  # chosen\n\n[model_providers.other]\nname = "other"\n\n[tui]\nnotifications = true\n'
    )
    content = {"model": "new", "catalog": "/c.json", "model_providers": {"kvbus": {"name": "kvbus"}}}
    text = merged_text(existing, ConfigFile(path="f", format="toml", content=content))
    assert "# mine" in text
    assert "# chosen" in text
    assert tomllib.loads(text) == {
        "model": "new",
        "catalog": "/c.json",
        "model_providers": {"other": {"name": "other"}, "kvbus": {"name": "kvbus"}},
        "tui": {"notifications": True},
    }


@pytest.mark.parametrize(
    ("existing", "kind", "problem"),
    [
        ('{"a": 1, // a comment\n}', "json", "no plain JSON"),
        ("[1]", "json", "no object"),
        ('{"a": 1}', "json", "something else than an object at a"),
        ('{"a": {"b": 1}}', "json", "something else than a list at a.b"),
        ('{"a": ' + "[" * 100_000, "json", "no plain JSON"),
        ("a = [", "toml", "no TOML"),
        ("a = 1", "toml", "something else than an object at a"),
    ],
)
def test_what_cannot_be_merged_is_refused(existing: str, kind: Any, problem: str) -> None:
    with pytest.raises(CannotMerge, match=problem):
        merged_text(existing, ConfigFile(path="f", format=kind, content={"a": {"b": ["c"]}}))


def test_a_changed_file_is_kept_and_an_unchanged_one_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "d" / "f.json"
    file = ConfigFile(path="d/f.json", content={"a": 1})
    assert write_files((file,), tmp_path) == [(path, None)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_files((file,), tmp_path) == []
    path.write_text('{"mine": true}')
    path.chmod(0o644)
    assert write_files((file,), tmp_path) == [(path, tmp_path / "d" / "f.json.backup-1")]
    assert (tmp_path / "d" / "f.json.backup-1").read_text() == '{"mine": true}'
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text("{}")
    assert write_files((file,), tmp_path) == [(path, tmp_path / "d" / "f.json.backup-2")]
    assert sorted(p.name for p in path.parent.iterdir()) == ["f.json", "f.json.backup-1", "f.json.backup-2"]


def test_a_file_of_kvbus_alone_is_replaced(tmp_path: Path) -> None:
    file = ConfigFile(path="own.env", format="env", content={"A": "1"}, owned=True)
    (tmp_path / "own.env").write_text("B=2\n")
    assert write_files((file,), tmp_path) == [(tmp_path / "own.env", None)]
    assert (tmp_path / "own.env").read_text() == "A=1\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "f.json").symlink_to("real.json")
    write_files((ConfigFile(path="f.json", content={"a": 1}),), tmp_path)
    assert (tmp_path / "f.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_nothing_is_written_when_one_of_the_files_cannot_be_merged(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{,}")
    with pytest.raises(CannotWrite, match=r"bad\.json is no plain JSON"):
        write_files((ConfigFile(path="a.json", content={}), ConfigFile(path="bad.json", content={})), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.json"]


def test_tables_that_stand_apart_are_one() -> None:
    existing = '[p.a]\nname = "a"\n\n[tui]\nx = 1\n\n[p.b]\nname = "b"\n'
    text = merged_text(existing, ConfigFile(path="f", format="toml", content={"p": {"kvbus": {"name": "k"}}}))
    assert tomllib.loads(text) == {
        "p": {"a": {"name": "a"}, "b": {"name": "b"}, "kvbus": {"name": "k"}},
        "tui": {"x": 1},
    }


def test_values_of_an_environment_file_are_one_value_whatever_is_in_them() -> None:
    content = {"URL": "http://127.0.0.1:8000/v1", "REFERENCE": "${KEY}", "KEY": "a #b'c\\d"}
    text = merged_text("", ConfigFile(path="f", format="env", content=content))
    assert text == "URL=http://127.0.0.1:8000/v1\nREFERENCE=${KEY}\nKEY='a #b\\'c\\\\d'\n"


def test_the_copy_has_the_bytes_that_were_there(tmp_path: Path) -> None:
    before = b'{"a": 1,\r\n "half": "\\ud800"}\r\n'
    (tmp_path / "f.json").write_bytes(before)
    write_files((ConfigFile(path="f.json", content={"b": 2}),), tmp_path)
    assert (tmp_path / "f.json.backup-1").read_bytes() == before
    assert json.loads((tmp_path / "f.json").read_bytes()) == {"a": 1, "half": "\ud800", "b": 2}


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "f.json").symlink_to("f.json")
    with pytest.raises(CannotWrite, match="cannot be read"):
        write_files((ConfigFile(path="f.json", content={}),), tmp_path)


def test_nothing_is_left_behind_when_a_file_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CannotWrite, match="no space"):
        write_files((ConfigFile(path="f.json", content={}),), tmp_path)
    assert list(tmp_path.iterdir()) == []
