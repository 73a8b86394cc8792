"""``python -m kvbus_parsers``: cases in, results out."""

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from kvbus_parsers.__main__ import main

CASE = {
    "id": "a",
    "parser": "hermes",
    "model_output": 'Hi. <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>',
}


def _run(*lines: object, chunks: str = "whole") -> tuple[int, list[dict[str, Any]]]:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    written = io.BytesIO()
    status = main(["--chunks", chunks], io.BytesIO(text.encode()), written)
    return status, [json.loads(line) for line in written.getvalue().splitlines()]


@pytest.mark.parametrize("chunks", ["whole", "char", "3"])
def test_a_case_gives_its_result(chunks: str) -> None:
    status, (answer,) = _run(CASE, chunks=chunks)
    assert status == 0
    call_id = answer["tool_calls"][0]["id"]
    call = {"id": call_id, "name": "f", "arguments": {"a": "é"}, "raw": '{"a": "é"}'}
    assert answer == {
        "id": "a",
        "segments": [{"type": "text", "text": "Hi."}, {"type": "tool_call", **call}],
        "content": "Hi.",
        "reasoning": None,
        "tool_calls": [call],
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"text"',
        {"parser": "hermes"},
        {**CASE, "parser": "herms"},
        {**CASE, "parser": 3},
        {**CASE, "finish": "done"},
        {**CASE, "finish": ["stop"]},
        {**CASE, "tools": {}},
        {**CASE, "tools": [1]},
        {**CASE, "request": []},
        {**CASE, "request": [1]},
        {**CASE, "engine_mode": "guided"},
        {**CASE, "engine_mode": "guided_json_arguments"},
        {**CASE, "parser": {"tool": 3}},
        '{"a": ' * 100_000,
        '{"parser": "hermes", "model_output": "x", "id": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"parser": "hermes", "model_output": "x", "id": NaN}',
        '{"parser": "hermes", "model_output": "x", "id": ' + "9" * 5000 + "}",
    ],
)
def test_a_bad_line_is_answered_with_an_error_and_the_others_with_results(line: object) -> None:
    status, (first, bad, last) = _run(CASE, line, CASE)
    assert status == 1
    assert bad["line"] == 2
    assert bad["error"]
    assert first["content"] == last["content"] == "Hi."


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "1e400", "9" * 5000, "NaN"])
def test_arguments_that_python_does_not_read_are_shown_as_text(value: str) -> None:
    output = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    status, (first, answer, last) = _run(CASE, {**CASE, "model_output": output}, CASE)
    assert status == 0
    (call,) = answer["tool_calls"]
    assert call["name"] == "f"
    assert call["arguments"] == call["raw"]
    assert call["raw"].startswith(f'{{"a": {value}}}')
    assert first["content"] == last["content"] == "Hi."


def test_a_case_chooses_its_parsers_and_its_mode() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    cases = [
        {
            "kind": "reasoning",
            "parser": "qwen3",
            "model_output": "A</think>B",
            "request": {"prompt_opens_reasoning": True},
        },
        {"parser": {"reasoning": "deepseek_r1"}, "model_output": "B", "request": {"prompt_closed_reasoning": True}},
        {
            "parser": {"reasoning": "deepseek_r1"},
            "model_output": "B",
            "request": {"grammar_active_from_first_token": True},
        },
        {"parser": "hermes", "tools": tools, "model_output": '{"a": 1}', "engine_mode": "guided_json_arguments"},
        {
            "parser": "hermes",
            "model_output": '[{"name": "f", "parameters": {"a": 1}}]',
            "engine_mode": "guided_json_array",
        },
        {**CASE, "request": {"tool_choice": "none"}},
        {"parser": {"tool": None, "reasoning": None}, "model_output": "\ud83d"},
    ]
    status, answers = _run(*cases)
    assert status == 0
    assert [(answer["reasoning"], answer["content"]) for answer in answers[:3]] == [
        ("A", "B"),
        (None, "B"),
        (None, "B"),
    ]
    assert [answer["tool_calls"][0]["arguments"] for answer in answers[3:5]] == [{"a": 1}] * 2
    assert (answers[5]["content"], answers[5]["tool_calls"], answers[6]["content"]) == ("Hi.", [], "\ud83d")


@pytest.mark.parametrize("chunks", ["0", "-1", "line", ""])
def test_a_chunking_that_means_nothing_is_refused(chunks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--chunks", chunks])
    assert "neither whole, char nor a positive number" in capsys.readouterr().err


def test_the_command_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvbus_parsers"],
        input=json.dumps(CASE) + "\n\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout)["content"] == "Hi."
