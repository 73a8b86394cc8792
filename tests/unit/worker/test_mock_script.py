from pathlib import Path

import pytest

from kvbus_worker.engines.mock.script import Script, ScriptError


def _script(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "script.jsonl"
    path.write_text(text, encoding="utf-8")
    return Script.load(path, 1 << 20)


def test_lines_without_match_are_played_in_order_once(tmp_path: Path) -> None:
    script = _script(tmp_path, '# greeting\n{"output": "one"}\n\n{"output": "two", "finish": "length"}\n')
    first, second, third = script.take("x"), script.take("x"), script.take("x")
    assert first is not None
    assert second is not None
    assert (first.output, second.output, second.finish, third) == ("one", "two", "length", None)


def test_a_matching_line_wins_as_often_as_it_matches_and_once_only_when_told(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        '{"output": "plain"}\n{"match": "tide", "output": "high", "once": true}\n{"match": "tide", "output": "low"}\n',
    )
    outputs = [output.output if (output := script.take(text)) else None for text in ("the tide?", "tide", "tide", "hm")]
    assert outputs == ["high", "low", "low", "plain"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"output": 3}',
        '{"outputs": "x"}',
        '{"output": "x", "finish": "maybe"}',
        '{"output":"x","chunks":["y"]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ScriptError, match=r"script\.jsonl:2"):
        _script(tmp_path, '{"output": "fine"}\n' + line + "\n")


def test_a_script_that_cannot_be_read_or_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError):
        Script.load(tmp_path / "missing", 10)
    (tmp_path / "large").write_text("x" * 11)
    with pytest.raises(ScriptError, match="larger than 10 bytes"):
        Script.load(tmp_path / "large", 10)
