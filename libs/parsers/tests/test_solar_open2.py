"""Solar Open 2's tokens."""

import pytest

from kvbus_parsers import open_parser
from kvbus_parsers.collect import Collected, collect

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}]


def _parse(text: str) -> Collected:
    results = []
    for chunks in ([text], list(text)):
        parser = open_parser(tool="solar_open2", tools=TOOLS, new_id=lambda: "id")
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        results.append(collect(events + parser.finish("stop")))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("f\n<|tool_arg:start|>n<|tool_arg:value|>1<|tool_arg:end|>\n", '{"n": 1}'),
        (
            "f\n<|tool_arg:start|>s<|tool_arg:value|> 1\n<|tool_arg:end|><|tool_arg:start|>n<|tool_arg:value|>2",
            '{"s": " 1\\n", "n": 2}',
        ),
        ("f\n", "{}"),
        ("f", "{}"),
    ],
)
def test_a_call_has_a_name_and_arguments(body: str, arguments: str) -> None:
    parsed = _parse(f"A\n<|tool_call:start|>{body}<|tool_call:end|>\nB")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", arguments)]
    assert parsed.content == "AB"


def test_a_missing_end_swallows_no_neighbour() -> None:
    parsed = _parse(
        "<|tool_call:start|>f\n<|tool_arg:start|>n<|tool_arg:value|>1<|tool_call:start|>f\n<|tool_call:end|>"
    )
    assert [call.arguments for call in parsed.tool_calls] == ['{"n": 1}', "{}"]


def test_an_opener_in_prose_is_text() -> None:
    text = "Calls begin with <|tool_call:start|> there."
    assert _parse(text).content == text
