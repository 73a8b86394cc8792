"""Reasoning blocks: what opens and closes them, what the prompt says, and how calls and text stand between them."""

import pytest

from kvbus_parsers import FinishReason, Reasoning, ReasoningEnded, Text, open_parser
from kvbus_parsers.collect import CallSegment, Collected, ReasoningSegment, TextSegment, collect

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def _parse(
    text: str,
    reasoning: str,
    *,
    tool: str | None = None,
    opened: bool | None = None,
    finish: FinishReason = "stop",
    force: bool = False,
) -> Collected:
    """The result, the same for the whole text and for single characters."""
    results = []
    for chunks in ([text], list(text)):
        parser = open_parser(
            tool=tool, reasoning=reasoning, reasoning_open=opened, new_id=lambda: "id", nonempty_content=force
        )
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        results.append(collect(events + parser.finish(finish), finish))
    assert results[0] == results[1]
    return results[0]


def _split(text: str, reasoning: str, opened: bool | None = None) -> tuple[str | None, str | None]:
    parsed = _parse(text, reasoning, opened=opened)
    return parsed.reasoning, parsed.content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<think>\nA\n</think>\n\nB"),
        ("basic", "<think>A</think>B"),
        ("deepseek-r1", "<think>A</think>B"),
        ("hunyuan_a13b", "<think>\nA\n</think>\n<answer>\nB\n</answer>"),
        ("ernie45", "<think>\nA\n</think>\n<response>\nB\n</response>\n"),
        ("seed_oss", "<seed:think>A</seed:think>B"),
        ("longcat", "<longcat_think>A</longcat_think>B"),
        ("minimax-m3", "<mm:think>A</mm:think>B"),
        ("mistral", "[THINK]A[/THINK]B"),
        ("mistral", "<think>A</think>B"),
        ("kimi", "◁think▷A◁/think▷B"),
        ("gemma4", "<|channel>thought\nA<channel|>B"),
        ("solar_open2", "A<|think:end|>B"),
        ("granite", "Here is my thought process: A Here is my response: B"),
        ("granite", "\nHere's my thought process:\nA\nHere's my response:\nB"),
    ],
)
def test_each_family_has_its_markers(name: str, text: str) -> None:
    assert _split(text, name) == ("A", "B")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "minimax_m2", "nemotron_nano", "kimi_k25"])
def test_the_prompt_decides_whether_marker_free_output_is_reasoning(name: str) -> None:
    assert _split("A", name, True) == ("A", None)
    assert _split("A", name, False) == (None, "A")


def test_without_a_word_from_the_prompt_the_family_decides() -> None:
    assert _split("A", "deepseek_r1") == ("A", None)
    assert _split("A", "qwen3") == (None, "A")


def test_a_second_opener_and_a_second_closer_are_swallowed() -> None:
    assert _split("<think>\nA<think>B</think>C</think>D", "qwen3", True) == ("AB", "CD")


def test_text_in_front_of_a_closer_without_an_opener_stays_text() -> None:
    assert _split("A</think>B", "qwen3") == (None, "AB")


def test_an_empty_block_is_no_reasoning() -> None:
    parser = open_parser(reasoning="qwen3")
    assert parser.feed("<think>\n\n</think>\n\nA") == [Text("A")]


def test_a_label_belongs_to_its_opener_only_as_a_line_of_its_own() -> None:
    assert _split("<|channel>thought\n<channel|>B", "gemma4") == (None, "B")
    assert _split("<|channel>thought<channel|>B", "gemma4") == (None, "B")
    assert _split("<|channel>thoughtful<channel|>B", "gemma4") == ("thoughtful", "B")


@pytest.mark.parametrize(
    "text", ["Here is my plan.", "Well. Here is my thought process: A", "A. Here is my response: B"]
)
def test_phrases_are_markers_only_where_a_block_can_be(text: str) -> None:
    assert _split(text, "granite") == (None, text)


def test_output_that_is_not_split_gets_its_opener_back() -> None:
    parsed = _parse(f"A</think>B\n{CALL}", "minimax_m2_append_think", tool="hermes")
    assert [type(segment) for segment in parsed.segments] == [TextSegment, CallSegment]
    assert parsed.content == "<think>A</think>B"


def test_the_end_of_a_block_is_said_at_once() -> None:
    parser = open_parser(reasoning="qwen3", reasoning_open=True)
    assert parser.in_reasoning
    assert parser.feed("A </th") == [Reasoning("A")]
    assert parser.in_reasoning
    assert parser.feed("ink>") == [ReasoningEnded()]
    assert not parser.in_reasoning
    assert parser.feed("\n B") == [Text("B")]


def test_reasoning_cut_off_is_reasoning() -> None:
    parsed = _parse("<think>A ", "qwen3", finish="length")
    assert (parsed.reasoning, parsed.content, parsed.finish_reason) == ("A", None, "length")


@pytest.mark.parametrize("name", ["qwen3", "glm45", "kimi_k2", "minimax_m2", "deepseek_v4", "mistral", "ling3"])
def test_a_call_ends_open_reasoning(name: str) -> None:
    parsed = _parse(f"A\n{CALL}\n<think>B</think>{CALL}C", name, tool="hermes", opened=True)
    assert [type(segment) for segment in parsed.segments] == [
        ReasoningSegment, CallSegment, ReasoningSegment, CallSegment, TextSegment,
    ]  # fmt: skip
    assert (parsed.reasoning, parsed.content) == ("AB", "C")


def test_a_call_ends_no_reasoning_of_a_family_that_writes_calls_only_behind_it() -> None:
    parsed = _parse(f"A {CALL}</think>{CALL}", "deepseek_r1", tool="hermes", opened=True)
    assert parsed.reasoning == f"A {CALL}"
    assert len(parsed.tool_calls) == 1


def test_a_marker_that_is_a_word_in_reasoning_stays_there() -> None:
    parsed = _parse('A <tool_call> B <tool_call>{"name" C}</tool_call></think>D', "qwen3", tool="hermes", opened=True)
    assert parsed.content == "D"
    assert parsed.reasoning is not None
    assert parsed.reasoning.startswith("A <tool_call> B")
    assert '{"name" C}' in parsed.reasoning


def test_an_output_of_nothing_but_reasoning_can_be_given_as_text_too() -> None:
    assert _parse("A", "nemotron_v3", opened=True, force=True).content == "A"
    assert _parse("A</think>B", "nemotron_v3", opened=True, force=True).content == "B"
    with_call = _parse(f"A</think>{CALL}", "nemotron_v3", tool="hermes", opened=True, force=True)
    assert (with_call.content, len(with_call.tool_calls)) == (None, 1)
