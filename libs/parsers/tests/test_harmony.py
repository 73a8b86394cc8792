"""Harmony beyond the shared cases: odd headers, joined messages, text that is no Harmony, bodies that are no JSON."""

from typing import Any

import pytest

from kvbus_parsers import FinishReason, open_parser
from kvbus_parsers.collect import CallSegment, ReasoningSegment, collect

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>assistant", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, COMMENTARY, FINAL = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final"))
TO_F = f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}"


def segments(
    text: str, tool: str | None = "harmony", reasoning: str | None = None, finish: FinishReason = "stop", **options: Any
) -> list[tuple[str, ...]]:
    """Kind and text, or name and arguments, and "cut" for calls that did not end; the same for any pieces."""
    found = []
    for size in (len(text) or 1, 1, 2, 3):
        parser = open_parser(tool=tool, reasoning=reasoning, **options)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        found.append(
            [
                (segment.name, segment.arguments, *([] if segment.complete else ["cut"]))
                if isinstance(segment, CallSegment)
                else ("reasoning" if isinstance(segment, ReasoningSegment) else "text", segment.text)
                for segment in collect(events + parser.finish(finish), finish).segments
            ]
        )
    assert all(one == found[0] for one in found)
    return found[0]


def test_messages_of_one_kind_are_joined_by_a_newline() -> None:
    output = f"{ANALYSIS}A {END}{START}{ANALYSIS} B{END}{START}{COMMENTARY}C {END}{START}{FINAL}\nD{RETURN}"
    assert segments(output) == [("reasoning", "A\nB"), ("text", "C\nD")]
    assert segments(f"{ANALYSIS}{END}{START}{ANALYSIS}B{END}") == [("reasoning", "B")]


def test_the_reasoning_format_alone_shows_calls_as_what_their_channel_is() -> None:
    output = f"{ANALYSIS}A{END}{START}{TO_F}{{}}{CALL}{START}{CHANNEL}analysis to=python code{MESSAGE}1+1{CALL}"
    assert segments(output, tool=None, reasoning="gpt_oss") == [
        ("reasoning", "A"),
        ("text", "{}"),
        ("reasoning", "1+1"),
    ]
    assert segments(output, reasoning="gpt_oss") == [("reasoning", "A"), ("f", "{}"), ("python", "1+1")]


@pytest.mark.parametrize("text", ["plain text", " [1, 2] ", "a < b", "to be", '{"a": 1}', "commentary on finals", ""])
def test_output_without_messages_is_text(text: str) -> None:
    assert segments(text) == ([("text", text)] if text else [])


@pytest.mark.parametrize(
    "header",
    [
        f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}",
        f"{CHANNEL}commentary to=functions.f{CONSTRAIN} json{MESSAGE}",
        f" to=functions.f{CHANNEL}analysis{MESSAGE}",
        f"{START} to=functions.f{CHANNEL}commentary json{MESSAGE}",
        f"{CHANNEL}final to=functions.f{MESSAGE}",
        f"{CHANNEL}commentary to=f code{MESSAGE}",
        f"commentary to=functions.f {CONSTRAIN}json{MESSAGE}",
        f"{CHANNEL}analysis to=functions.f{MESSAGE}",
    ],
)
def test_the_recipient_is_found_wherever_the_header_has_it(header: str) -> None:
    assert segments(f'{header}{{"a": 1}}{CALL}') == [("f", '{"a": 1}')]


def test_a_message_to_a_role_is_no_call() -> None:
    assert segments(f"{CHANNEL}commentary to=user{MESSAGE}x{END}") == [("text", "x")]
    assert segments(f"{CHANNEL}commentary to=functions.user{MESSAGE}{{}}{CALL}") == [("user", "{}")]
    assert segments(f"{CHANNEL}commentary to=assistant{CHANNEL}analysis{MESSAGE}x{END}") == [("reasoning", "x")]


def test_tokens_inside_strings_of_arguments_are_data() -> None:
    arguments = f'{{"a": "{CALL}{START} \\" {END}"}}'
    assert segments(f"{TO_F}{arguments} {CALL}{START}{FINAL}x{RETURN}") == [("f", arguments), ("text", "x")]


def test_bodies_that_are_no_json_go_out_raw_and_their_neighbours_survive() -> None:
    output = (
        f'{TO_F}{{"a": bad}}{CALL}{START} to=python{CHANNEL}analysis code{MESSAGE}print(1)\n{CALL}{START}{TO_F}{CALL}'
    )
    assert segments(output) == [("f", '{"a": bad}'), ("python", "print(1)\n"), ("f", "{}")]


def test_a_call_whose_end_token_was_the_stop_token_is_whole() -> None:
    assert segments(f'{TO_F}{{"a": 1}}') == [("f", '{"a": 1}')]


def test_a_cut_call_stays_open_and_a_cut_header_vanishes() -> None:
    assert segments(f'{TO_F}{{"a": "x', finish="length") == [("f", '{"a": "x', "cut")]
    assert segments(f"{ANALYSIS}A{END}{START}{CHANNEL}comm", finish="length") == [("reasoning", "A")]
    assert segments(f"{ANALYSIS}A{END}<|sta", finish="length") == [("reasoning", "A")]


def test_a_header_without_a_message_loses_its_words_and_nothing_else() -> None:
    assert segments(f"{CHANNEL}commentary?? and so on{END}{START}{FINAL}B{RETURN}") == [("text", "?? and so on\nB")]
    long = "word " * 400
    assert segments(f"{CHANNEL}{long}") == [("text", long)]


def test_a_role_without_its_start_token_is_no_text() -> None:
    assert segments(
        f"assistant{ANALYSIS}A{END}assistant{FINAL}B{END}assistant to=functions.f{CHANNEL}commentary{MESSAGE}{{}}{CALL}"
    ) == [
        ("reasoning", "A"),
        ("text", "B"),
        ("f", "{}"),
    ]
    assert segments("assistant of mine") == [("text", "assistant of mine")]
    assert segments(f"{FINAL}A{END}assistant of mine") == [("text", "A\nassistant of mine")]


def test_text_between_messages_is_shown() -> None:
    assert segments(f"{FINAL}A{END} loose {START}{FINAL}B{RETURN}\n") == [("text", "A\nloose\nB")]


def test_guided_calls_are_found_in_the_final_message_and_without_any_message() -> None:
    guided = '[{"name": "f", "parameters": {"a": 1}}]'
    assert segments(f"{ANALYSIS}A{END}{START}{FINAL}{guided}{RETURN}", calls="guided_array") == [
        ("reasoning", "A"),
        ("f", '{"a": 1}'),
    ]
    assert segments(guided, calls="guided_array") == [("f", '{"a": 1}')]
    assert segments('{"a": 1}', calls="guided_arguments:f") == [("f", '{"a": 1}')]


def test_a_prompt_that_ends_inside_the_analysis_goes_on_there() -> None:
    output = f"A{END}{START}{ANALYSIS}B{END}{START}{FINAL}C{RETURN}"
    assert segments(output, reasoning="gpt_oss", reasoning_open=True) == [("reasoning", "A\nB"), ("text", "C")]


def test_dropped_calls_leave_the_prose() -> None:
    assert segments(f"{COMMENTARY}A{END}{START}{TO_F}{{}}{CALL}{START}{FINAL}B{RETURN}", calls="drop")[0][0] == "text"
