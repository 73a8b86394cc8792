from functools import partial
from pathlib import Path

import pytest

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.mock.script import Script, ScriptError, ScriptFile


def _script(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "script.jsonl"
    path.write_text(text, encoding="utf-8")
    return Script.load(path, 1 << 20)


def _outputs(script: Script, *prompts: str) -> list[str | None]:
    lines = [script.take(partial(str, prompt)) for prompt in prompts]
    return [line.output if line is not None else None for line in lines]


def test_lines_without_match_are_played_in_order_once(tmp_path: Path) -> None:
    script = _script(tmp_path, '# greeting\n{"output": "one"}\n\n{"output": "two", "finish": "length"}\n')
    assert _outputs(script, "x", "x", "x") == ["one", "two", None]


def test_a_matching_line_wins_as_often_as_it_matches_and_once_only_when_told(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        '{"output": "plain"}\n{"match": "tide", "output": "high", "once": true}\n{"match": "tide", "output": "low"}\n',
    )
    assert _outputs(script, "the tide?", "tide", "tide", "hm") == ["high", "low", "low", "plain"]


def test_the_line_whose_match_stands_last_in_the_prompt_wins(tmp_path: Path) -> None:
    text = (
        '{"match": "ebb", "output": "first"}\n'
        '{"match": ["title", "ebb"], "output": "title"}\n'
        '{"match": "flow", "output": "second"}\n'
    )
    script = _script(tmp_path, text)
    prompts = ("ebb " + "reminder " * 9000, "ebb flow", "flow then ebb", "a title: ebb", "title ebb flow")
    assert _outputs(script, *prompts) == ["first", "second", "first", "first", "second"]


def test_of_two_matches_that_end_together_the_earlier_line_wins(tmp_path: Path) -> None:
    script = _script(tmp_path, '{"match": ["title", "ebb"], "output": "title"}\n{"match": "ebb", "output": "talk"}\n')
    assert _outputs(script, "a title: ebb", "ebb") == ["title", "talk"]


def test_a_prompt_is_not_decoded_for_a_script_that_matches_nothing(tmp_path: Path) -> None:
    def prompt() -> str:
        raise AssertionError

    line = _script(tmp_path, '{"output": "one"}\n').take(prompt)
    assert line is not None


def test_a_line_without_output_that_has_an_error_refuses(tmp_path: Path) -> None:
    text = (
        '{"error": {"code": "overloaded", "retry_after_s": 3}}\n'
        '{"output": "half", "error": {"code": "internal", "message": "broken"}}\n'
    )
    script = _script(tmp_path, text)
    refused, broken = script.take(str), script.take(str)
    assert refused is not None
    assert broken is not None
    assert refused.error is not None
    assert (refused.refuses, refused.error.code, refused.error.retry_after_s) == (True, ErrorCode.OVERLOADED, 3.0)
    assert (broken.refuses, broken.output) == (False, "half")


def test_a_file_that_has_changed_is_read_again_and_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"output": "one"}\n{"output": "two"}\n')
    script = ScriptFile(path, 1 << 20)
    before = script.take(str)
    new = tmp_path / "new.jsonl"
    new.write_text('{"output": "three"}\n{"output": "four"}\n')
    new.replace(path)
    after = [script.take(str), script.take(str), script.take(str)]
    assert before is not None
    assert before.output == "one"
    assert [line.output if line is not None else None for line in after] == ["three", "four", None]
    path.write_text("no json")
    with pytest.raises(ScriptError, match=r"script\.jsonl:1"):
        script.take(str)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"output": 3}',
        '{"outputs": "x"}',
        '{"output": "x", "finish": "maybe"}',
        '{"output":"x","chunks":["y"]}',
        '{"error": {"code": "no such code"}}',
        '{"output": "x", "prefill_s": -1}',
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
