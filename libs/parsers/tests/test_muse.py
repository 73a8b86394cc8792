from collections.abc import Callable

import pytest

from kvbus_parsers import open_parser

Read = Callable[..., list[object]]

BOTH = {"tool": "muse", "reasoning": "muse"}
CALL = '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>'
CALLS = f"<atem:function_calls>\n{CALL}\n</atem:function_calls>"
NEXT = "<|eom|><|start|>assistant"


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param(f" to=self<|message|>a{NEXT} to=user<|message|>b<|eot|>", [["a"], "b"], id="reasoning and text"),
        pytest.param(f" to=f<|message|>{CALLS}<|eom|>", [("f", '{"a": "1"}')], id="a call"),
        pytest.param(
            f" to=self<|message|>a{NEXT} to=f<|message|>{CALLS}<|eom|>",
            [["a"], ("f", '{"a": "1"}')],
            id="reasoning and a call",
        ),
        pytest.param(
            f" to=f<|message|>{CALLS}{NEXT} to=f<|message|>{CALLS}<|eom|>", [("f", '{"a": "1"}')] * 2, id="two calls"
        ),
        pytest.param(f" to=self<|message|>say {CALLS}<|eom|>", [[f"say {CALLS}"]], id="a call in reasoning is none"),
        pytest.param(f" to=user<|message|>say {CALLS}<|eot|>", [f"say {CALLS}"], id="nor is one in text"),
        pytest.param("<|message|>a<|eot|>", ["a"], id="no recipient"),
        pytest.param("a to=b c", ["a to=b c"], id="no header"),
        pytest.param(f"a {CALLS} b", ["a", ("f", '{"a": "1"}'), "b"], id="calls without headers"),
        pytest.param(
            "to=self<|message|>a<|start|>assistant to=user<|message|>b", [["a"], "b"], id="no end of a message"
        ),
        pytest.param("to=self<|message|>a<|eom|>b", [["a"], "b"], id="no header behind a message"),
        pytest.param("to=f<|message|>well, <atem:invoke>", ["well, <atem:invoke>"], id="text to a tool"),
    ],
)
def test_the_recipient_decides_what_a_message_is(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, BOTH) == wanted


def test_without_a_tool_format_calls_are_text(read: Read) -> None:
    assert read(f" to=self<|message|>a{NEXT} to=f<|message|>{CALLS}<|eom|>", {"reasoning": "muse"}) == [["a"], CALLS]


def test_a_doubled_name_is_that_of_the_tool(read: Read) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    output = ' to=f<|message|><atem:invoke name="f.f"></atem:invoke><|eom|>'
    assert read(output, "muse", tools=[tool]) == [("f", "{}")]
    assert read(output, "muse") == [("f.f", "{}")]


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (" to=se", []),
        (" to=self<|mess", []),
        (" to=self<|message|>a", [["a"]]),
        (" to=f<|message|><atem:function_calls>\n<atem:inv", []),
        (' to=f<|message|><atem:invoke name="f"><atem:parameter name="a">1', [("f", '{"a": "1…')]),
    ],
)
def test_a_cut_output_gives_what_is_certain(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, BOTH, finish="length") == wanted


def test_guided_output_is_read_where_text_begins(read: Read) -> None:
    parser = open_parser(tool="muse", calls="guided_arguments:f", new_id=lambda: "id")
    events = parser.feed(
        ' to=self<|message|>a<|eom|><|start|>assistant to=f<|message|>{"a": 1}<|eot|>'
    ) + parser.finish("stop")
    assert [type(event).__name__ for event in events] == [
        "Reasoning",
        "ReasoningEnded",
        "CallStarted",
        "CallArguments",
        "CallEnded",
    ]
