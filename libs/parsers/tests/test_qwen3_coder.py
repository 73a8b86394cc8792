from collections.abc import Callable

import pytest

from kvbus_parsers import CallArguments, CallEnded, open_parser

Read = Callable[..., list[object]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "properties": {
                    "body": {"type": "string"},
                    "count": {"type": "integer"},
                    "note": {"type": ["string", "null"]},
                }
            },
        },
    }
]


def test_a_string_goes_out_as_it_comes_and_only_what_may_be_framing_waits() -> None:
    parser = open_parser(tool="qwen3_coder", tools=TOOLS)
    events = parser.feed("<tool_call>\n<function=write>\n<parameter=body>\n")
    deltas = [event.text for event in events if isinstance(event, CallArguments)]
    for text in ("a", "b\n", "\n", "c <", "/par", "x"):
        deltas += ["|", *(event.text for event in parser.feed(text) if isinstance(event, CallArguments))]
    assert "".join(deltas) == '{"body": "|a|b|\\n|\\nc |</par|x'.replace("|</par|x", "||</parx")


def test_a_string_that_may_be_null_waits_only_while_it_can_still_become_that() -> None:
    parser = open_parser(tool="qwen3_coder", tools=TOOLS)
    parser.feed("<function=write>\n<parameter=note>\n")
    assert parser.feed("nu") == []
    assert parser.feed("mber") == [CallArguments(0, '"number')]


def test_a_call_tells_what_the_model_wrote_per_argument() -> None:
    parser = open_parser(tool="qwen3_coder", tools=TOOLS)
    events = parser.feed(
        "<function=write>\n<parameter=count>\n+07\n</parameter>\n<parameter=body>\n\na\n\n</parameter>\n</function>"
    )
    ended = events[-1]
    assert isinstance(ended, CallEnded)
    assert ended.arguments == '{"count": 7, "body": "\\na\\n"}'
    assert ended.written == {"count": "+07", "body": "\na\n"}


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param(
            "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
            [("f", '{"a": "1"}')],
            id="no newlines",
        ),
        pytest.param("<function=f>\n<parameter=a>\n1\n</function>", [("f", '{"a": "1"}')], id="no end of the value"),
        pytest.param(
            "<function=f><parameter=a>\n1\n<parameter=b>2</function>",
            [("f", '{"a": "1", "b": "2"}')],
            id="the next parameter",
        ),
        pytest.param(
            "<tool_call><function=f><parameter=a>1</parameter></tool_call>",
            [("f", '{"a": "1"}')],
            id="no end of the function",
        ),
        pytest.param(
            "<function=f></function> a <function=g></function>",
            [("f", "{}"), "a", ("g", "{}")],
            id="text between bare functions",
        ),
        pytest.param(
            "<tool_call><function=f></function> a <function=g></function></tool_call>",
            [("f", "{}"), "a", ("g", "{}")],
            id="in one",
        ),
        pytest.param("<tool_call>\n<function=f>\n</function>\nBye.", [("f", "{}"), "Bye."], id="no end of the wrapper"),
        pytest.param(
            "<tool_call>\n<tool_call>\n<function=f></function></tool_call>", [("f", "{}")], id="the wrapper twice"
        ),
        pytest.param("a.<tool_call>\n</tool_call>b", ["a.b"], id="an empty wrapper"),
        pytest.param(
            "<function=f></function></parameter></function></tool_call>b", [("f", "{}"), "b"], id="stray closers"
        ),
        pytest.param("a.</parameter>\n</function>\n</tool_call>b", ["a.b"], id="closers of no call"),
        pytest.param(
            "<a></parameter></function></a>", ["<a></parameter></function></a>"], id="closers of other markup"
        ),
        pytest.param("Use <function=f> to call.", ["Use <function=f> to call."], id="a bare tag in prose"),
        pytest.param(
            "<tool_call>\n<function=f\n<parameter=a>1</parameter></function></tool_call>",
            [("f", '{"a": "1"}')],
            id="no >",
        ),
        pytest.param("<tool_call>\n<function=\n</tool_call>\n<function=g></function>", [("g", "{}")], id="no name"),
        pytest.param('<tool_call><function=f>{"a": 1}</function>', [("f", '{"a": 1}')], id="JSON for parameters"),
        pytest.param(
            "<tool_call><function=f>what?<parameter=a>1</parameter></function>",
            [("f", 'what?{"a": "1"}')],
            id="text for parameters",
        ),
        pytest.param(
            "<function=f><parameter=a>1</parameter> so <parameter=b</function>",
            [("f", '{"a": "1"so <parameter=b}')],
            id="broken",
        ),
        pytest.param(
            "<function=f><parameter=a>1</parameter></parameter></function>",
            [("f", '{"a": "1"}')],
            id="the end of a value twice",
        ),
        pytest.param("<function=f><parameter=a>1", [("f", '{"a": "1…')], id="the end of the output"),
    ],
)
def test_a_form_that_is_not_quite_the_template_s(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "qwen3_coder") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a<tool_call", ["a<tool_call"]),
        ("a<tool_call>", ["a"]),
        ("a<tool_call>\n<func", ["a"]),
        ("a<tool_call>\n<function=wri", ["a"]),
        ("a<function=write>\n<para", ["a"]),
        ("<function=write>\n<parameter=body", [("write", "…")]),
        ("<function=write>\n<parameter=body>\nx\n", [("write", '{"body": "x…')]),
        ("<function=write>\n<parameter=count>\n12", [("write", '{"count": 12…')]),
        ("<function=write>\n<parameter=count>\n12\n</parameter>", [("write", '{"count": 12…')]),
        ("<function=write>\n</function>\n</tool_c", [("write", "{}"), "</tool_c"]),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "qwen3_coder", tools=TOOLS, finish="length") == wanted


def test_a_call_ends_open_reasoning_but_the_word_for_it_does_not(read: Read) -> None:
    both = {"tool": "qwen3_coder", "reasoning": "qwen3"}
    assert read("<think>a <tool_call> b\n<function=f>\n</function>c", both) == [["a <tool_call> b"], ("f", "{}"), "c"]


def test_mimo_frames_no_values(read: Read) -> None:
    assert read("<function=f><parameter=a>\n1\n</parameter></function>", "mimo") == [("f", '{"a": "\\n1\\n"}')]


def test_seed_has_a_wrapper_of_its_own(read: Read) -> None:
    output = "<tool_call> <seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>"
    assert read(output, "seed_oss") == ["<tool_call>", ("f", "{}")]
